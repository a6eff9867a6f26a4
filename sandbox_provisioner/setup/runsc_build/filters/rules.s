// Nothing: a function without a body, as main.go has one, is allowed only beside a file of assembly.
