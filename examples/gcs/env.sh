# Save kernels in a bucket of Google Cloud Storage. Use the same settings on all servers.
# Usage: BUCKET=my-bucket . examples/gcs/env.sh; jupyter lab
: "${BUCKET:?name your bucket, without gs://}"
export SANDBOX_METADATA_BUCKET="$BUCKET"
export SANDBOX_LOCK_BUCKET="$BUCKET"
export SANDBOX_CHECKPOINT_BUCKET="$BUCKET"
export FILESYSTEM_SNAPSHOT_BUCKET="$BUCKET"
# A sandbox is identified by the user's name, the notebook's path and the kernelspec. In containers, many people often
# have the same user name. Then give each person a separate prefix.
export SANDBOX_OBJECT_PREFIX="sandboxes/$(id -un)"
# The key signs stored data, so that other users cannot change it. Use one key per user, on all servers of that user.
# Create it with `openssl rand -hex 32`, and store it like a password.
: "${SANDBOX_SIGNING_KEY:?create a key for your servers: openssl rand -hex 32}"
export SANDBOX_SIGNING_KEY
# Let a server that opens a notebook take it over from the server that runs it.
export SANDBOX_ENABLE_HANDOFF=1
