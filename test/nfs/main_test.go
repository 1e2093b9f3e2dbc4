//go:build vm

// Package nfs tests pools on NFS exports: several nodes use one pool, servers restart, links break,
// and administrators and attackers change exports. Each driver runs in its own network namespace with
// the kernel's NFS client, and the servers are the kernel's. The tests run in the virtual machine of
// test/vm. TestHealth also tests what a user sees of the disks of a node.
package nfs

import (
	"fmt"
	"os"
	"testing"

	"github.com/trivet-csi/trivet/internal/testenv"
)

func TestMain(m *testing.M) {
	// A writer starts the test binary as a process that writes records.
	if len(os.Args) == 3 && os.Args[1] == writerCommand {
		if err := writeRecords(os.Args[2]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	testenv.Main(m)
}
