//go:build vm

// Package nfs tests nfs pools on several nodes, with servers that restart and links that break.
// Each driver is a process in its own network, and the server is the kernel's. The tests run in
// the virtual machine of test/vm.
package nfs

import (
	"fmt"
	"os"
	"testing"

	"github.com/trivet-csi/trivet/internal/testenv"
)

func TestMain(m *testing.M) {
	if len(os.Args) == 3 && os.Args[1] == writerCommand {
		if err := writeRecords(os.Args[2]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	testenv.Main(m)
}
