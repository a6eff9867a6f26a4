// Filters writes what an ordinary `go build` of runsc lacks: seccomp programs that were compiled beforehand.
//
// gVisor's own build has them; without them every start and every restore of a sandbox compiles its rules anew. They
// come of the very rules that runsc would compile, and runsc chooses by all that those depend on: where no program
// fits, it compiles one as before.
//
// `filters GVISOR` adds them to the copy of gVisor's module in the folder GVISOR.
package main

import (
	"fmt"
	"log"
	"os"
	"path/filepath"
	"strings"
	_ "unsafe" // for go:linkname

	"gvisor.dev/gvisor/pkg/seccomp"
	"gvisor.dev/gvisor/pkg/seccomp/precompiledseccomp"
	"gvisor.dev/gvisor/pkg/sentry/platform"
	sentry "gvisor.dev/gvisor/runsc/boot/filter/config"
	gofer "gvisor.dev/gvisor/runsc/fsgofer/filter/config"
)

// gVisor compiles hundreds of programs, for all kinds of devices; of those we want the ones without any, and the function
// that its own choice is made with is not exported.
//
//go:linkname rules gvisor.dev/gvisor/runsc/boot/filter/config.rules
func rules(sentry.Options, precompiledseccomp.Values) (seccomp.SyscallRules, seccomp.SyscallRules)

// Where a file begins to have programs.
const place = "\tprecompiledPrograms = programs\n"

func main() {
	log.SetFlags(0)
	if len(os.Args) != 2 {
		log.Fatal("usage: filters GVISOR")
	}
	for name, programs := range map[string]func() ([]precompiledseccomp.Program, error){
		"boot":    sentryPrograms,
		"fsgofer": gofer.PrecompiledPrograms,
	} {
		file := filepath.Join(os.Args[1], "runsc", name, "filter", "filter_precompiled.go")
		if err := add(file, programs); err != nil {
			log.Fatalf("%s: %v", file, err)
		}
	}
}

func add(file string, compile func() ([]precompiledseccomp.Program, error)) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	if strings.Count(string(text), place) != 1 {
		return fmt.Errorf("it has no one place for programs")
	}
	programs, err := compile()
	if err != nil {
		return err
	}
	var all strings.Builder
	for _, program := range programs {
		all.WriteString(program.Registration("\t", "precompiledseccomp", "programs"))
	}
	return os.WriteFile(file, []byte(strings.Replace(string(text), place, all.String()+place, 1)), 0o644)
}

// sentryPrograms are those for every platform, with and without the host's network and its files.
func sentryPrograms() (programs []precompiledseccomp.Program, err error) {
	for _, name := range platform.List() {
		constructor, err := platform.Lookup(name)
		if err != nil {
			return nil, err
		}
		for _, info := range constructor.PrecompiledSeccompInfo() {
			for variant := range 4 {
				options := sentry.Options{Platform: info, HostNetwork: variant&1 != 0, HostFilesystem: variant&2 != 0}
				program, err := precompiled(options)
				if err != nil {
					return nil, err
				}
				programs = append(programs, program)
			}
		}
	}
	return programs, nil
}

func precompiled(options sentry.Options) (precompiledseccomp.Program, error) {
	var names []string
	for name := range options.Vars() {
		names = append(names, name)
	}
	return precompiledseccomp.Precompile(options.ConfigKey(), names, func(vars precompiledseccomp.Values) *seccomp.Program {
		allowed, denied := rules(options, vars)
		return &seccomp.Program{
			RuleSets: []seccomp.RuleSet{{Rules: denied.Copy()}, {Rules: allowed.Copy(), Action: seccomp.Allow}},
			Options:  sentry.SeccompOptions(options),
		}
	})
}
