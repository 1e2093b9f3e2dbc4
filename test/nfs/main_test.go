//go:build vm

// Package nfs tests nfs pools from several nodes, with servers that restart and
// links that break: drivers as processes, each in a network of its own, against
// the kernel's server. It runs in the virtual machine of test/vm.
package nfs

import (
	"testing"

	"github.com/trivet-csi/trivet/internal/testenv"
)

func TestMain(m *testing.M) { testenv.Main(m) }
