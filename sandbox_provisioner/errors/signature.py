"""Errors of stored documents that are not signed with the user's key."""

from __future__ import annotations

from . import SandboxError
from .kinds import Kind


class SignatureError(SandboxError, kind=Kind.NOT_SIGNED):
    """A stored document is not signed with this user's key; ``foreign`` is True if it may be another user's.

    ``reason`` is a predicate, such as "is not signed"; ``setting`` is the variable that can solve the problem.
    """

    def __init__(self, problem: str, remedy: str, foreign: bool, reason: str = "", setting: str = "") -> None:
        self.foreign, self.reason, self.setting = foreign, reason, setting
        super().__init__(problem, remedy)

    @classmethod
    def unsigned(cls, name: str, where: str, foreign: bool) -> SignatureError:
        """Return the error for a document without a signature."""
        problem = f"{name} in {where} is not signed and was refused: anyone who can write there could have made it."
        remedy = (
            "If you saved it with a version that did not sign documents, set SANDBOX_TRUST_STORAGE=1, open the sandbox "
            "once and unset the variable. To delete it, run `jupyter sandbox delete --unverified` with its id."
        )
        return cls(problem, remedy, foreign, "is not signed", "SANDBOX_TRUST_STORAGE")

    @classmethod
    def other_key(cls, name: str, where: str, theirs: str, ours: str) -> SignatureError:
        """Return the error for a document that was signed with another key."""
        problem = f"{name} in {where} is signed with the key {theirs} and was refused: this server's key is {ours}."
        remedy = (
            "Servers that share storage need the same key. On the server that saved it, the key is in the file "
            "sandbox/key in Jupyter's data folder: set SANDBOX_SIGNING_KEY to it on all servers. If that key is lost, "
            "run `jupyter sandbox doctor` for advice."
        )
        return cls(problem, remedy, True, f"is signed with the key {theirs}", "SANDBOX_SIGNING_KEY")

    @classmethod
    def changed(cls, name: str, where: str) -> SignatureError:
        """Return the error for a document that does not match its signature."""
        problem = f"{name} in {where} does not match its signature and was refused: it was changed or moved."
        remedy = "Find out who can write there. Restore the original, or delete the sandbox."
        return cls(problem, remedy, False, "was changed after it was signed")

    @classmethod
    def of_another(cls, name: str, where: str, user: str) -> SignatureError:
        """Return the error for a refusal to delete a document that is not verified and names another user."""
        problem = f"{name} in {where} was not deleted: it names the user {user!r:.100} and is not signed with your key."
        remedy = "Only that user or an administrator of the storage can delete it."
        return cls(problem, remedy, True, "names another user")
