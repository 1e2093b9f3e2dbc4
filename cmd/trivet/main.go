// Command trivet is a CSI driver for storage that the nodes already have. See
// `trivet help`.
package main

import (
	"errors"
	"fmt"
	"os"

	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/internal/reexec"
)

// version is set when a release is built (-ldflags -X main.version=…).
var version = "dev"

const usage = `usage: trivet COMMAND [FLAG]...

  driver          serve CSI on a Unix socket
  volumes         list the volumes of the pools, read from the disk
  doctor          check what works on this node, with suggested fixes
  pool            make an NFS export a pool
  volume-manager  mount the volumes of pods without a kubelet
  flexvolume      answer one call of a kubelet, as a FlexVolume driver
  version         print the version
  help            print this

Each command has --help.
`

func main() {
	if dir := flexvolumeDir(os.Args[0]); dir != "" {
		if err := runFlexvolume(dir, os.Args[1:]); err != nil && !errors.Is(err, errHelp) {
			os.Exit(1)
		}
		return
	}
	command := "help"
	if len(os.Args) > 1 {
		command = os.Args[1]
	}
	roles := driver.Roles(kinds)
	roles[taskRole] = runTask
	isChild, err := reexec.Run(os.Args, roles)
	if !isChild {
		err = runCommand(command)
	}
	if errors.Is(err, errAnswered) {
		os.Exit(1)
	}
	if err != nil && !errors.Is(err, errHelp) {
		fmt.Fprintf(os.Stderr, "trivet %s: %v\n", command, err)
		os.Exit(1)
	}
}

var commands = map[string]func(args []string) error{
	"driver":         runDriver,
	"volumes":        runVolumes,
	"doctor":         runDoctor,
	"pool":           runPool,
	"volume-manager": runVolumeManager,
	"flexvolume":     func(args []string) error { return runFlexvolume("", args) },
	onDemandCommand:  runOnDemandDriver,
}

func runCommand(command string) error {
	run := commands[command]
	switch {
	case run != nil:
		return run(os.Args[2:])
	case command == "version" || command == "--version":
		fmt.Println("trivet", version)
	case command == "help" || command == "--help" || command == "-h":
		fmt.Print(usage)
	default:
		fmt.Fprintf(os.Stderr, "trivet: unknown command %q\n\n%s", command, usage)
		os.Exit(2)
	}
	return nil
}
