// Filters adds precompiled seccomp programs to the source of runsc. An ordinary `go build` has none.
//
// gVisor's own build has them. Without them, runsc compiles its rules at every start and restore of a sandbox. The
// programs are compiled from the same rules. runsc looks them up by all options that the rules depend on, and compiles
// the rules itself if no program matches.
//
// `filters GVISOR` changes the copy of gVisor's module in the folder GVISOR.
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

// gVisor precompiles hundreds of programs, for all kinds of devices. We need only those without devices, but gVisor's
// function that makes the rules for one set of options is not exported.
//
//go:linkname rules gvisor.dev/gvisor/runsc/boot/filter/config.rules
func rules(sentry.Options, precompiledseccomp.Values) (seccomp.SyscallRules, seccomp.SyscallRules)

// The line before which the programs are inserted.
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
		return fmt.Errorf("it does not contain exactly one line %q", place)
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

// sentryPrograms returns a program for each platform, with and without the host's network and files.
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
