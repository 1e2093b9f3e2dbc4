// Command trivet is a CSI driver for storage that the nodes already have. See
// `trivet help`.
package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"

	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/internal/reexec"
)

// version is set when a release is built (-ldflags -X main.version=…).
var version = "dev"

func main() {
	os.Exit(run(os.Args))
}

// run runs the program with its name and arguments, and returns its exit status. Calls of a kubelet and child
// processes need no command tree, so they start without one.
func run(args []string) int {
	if dir := flexvolumeDir(args[0]); dir != "" {
		return exitStatus(runLinked(dir, args[1:]), args[0])
	}
	roles := driver.Roles(kinds)
	roles[taskRole] = runTask
	if isChild, err := reexec.Run(args, roles); isChild {
		return exitStatus(err, "trivet "+args[1])
	}
	if len(args) > 1 && args[1] == onDemandCommand {
		return exitStatus(runOnDemandDriver(args[2:]), "trivet "+onDemandCommand)
	}
	tree, words := newRootCommand, args[1:]
	switch filepath.Base(args[0]) {
	case pluginName:
		tree = newPluginCommand
	case completionName:
		tree, words = newPluginCommand, append([]string{cobra.ShellCompRequestCmd}, words...)
	}
	command, err := tree().execute(words)
	return exitStatus(err, command)
}

// exitStatus prints an error of a command to standard error, and returns the exit status: 2 for an incorrect
// command line, 1 for other errors.
func exitStatus(err error, command string) int {
	var usage *usageError
	switch {
	case err == nil:
		return 0
	case errors.Is(err, errAnswered):
		return 1
	case errors.As(err, &usage):
		fmt.Fprintf(os.Stderr, "%s: %v. Run '%[1]s --help'.\n", usage.command, err)
		return 2
	}
	fmt.Fprintf(os.Stderr, "%s: %v\n", command, err)
	return 1
}
