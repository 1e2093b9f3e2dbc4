// Command trivet is a CSI driver for the storage that is there already. See
// `trivet help`.
package main

import (
	"errors"
	"fmt"
	"os"

	"github.com/trivet-csi/trivet/freeze"
)

// version is set when a release is built (-ldflags -X main.version=…).
var version = "dev"

const usage = `usage: trivet COMMAND [FLAG]...

  driver          serve CSI on a Unix socket
  volumes         list what is in the pools, from the disk
  doctor          tell what this node can and cannot do, and what to mend
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
	var err error
	switch command {
	case "driver":
		err = runDriver(os.Args[2:])
	case "volumes":
		err = runVolumes(os.Args[2:])
	case "doctor":
		err = runDoctor(os.Args[2:])
	case "pool":
		err = runPool(os.Args[2:])
	case "volume-manager":
		err = runVolumeManager(os.Args[2:])
	case "flexvolume":
		err = runFlexvolume("", os.Args[2:])
	case childCommand:
		err = runTask(os.Args[2:])
	case workerCommand:
		err = runWorker(os.Args[2:])
	case freeze.Command:
		err = freeze.Guard(os.Args[2:])
	case "version", "--version":
		fmt.Println("trivet", version)
	case "help", "--help", "-h":
		fmt.Print(usage)
	default:
		fmt.Fprintf(os.Stderr, "trivet: unknown command %q\n\n%s", command, usage)
		os.Exit(2)
	}
	if errors.Is(err, errAnswered) {
		os.Exit(1)
	}
	if err != nil && !errors.Is(err, errHelp) {
		fmt.Fprintf(os.Stderr, "trivet %s: %v\n", command, err)
		os.Exit(1)
	}
}
