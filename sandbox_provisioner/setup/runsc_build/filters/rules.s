// Empty on purpose: Go allows a function without a body, as in main.go, only in a package with an assembly file.
