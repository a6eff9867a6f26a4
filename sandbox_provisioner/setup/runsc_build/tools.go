//go:build tools

// Package tools makes gVisor's runsc a dependency of this module, so that go.sum pins every byte it is built from.
package tools

import _ "gvisor.dev/gvisor/runsc"
