//go:build vm

package verify

import (
	"fmt"
	"testing"

	"github.com/trivet-csi/trivet/internal/testenv/nfsd"
)

// TestNFS is TestHistories for a pool on an export.
func TestNFS(t *testing.T) {
	server := nfsd.Start(t, nfsd.Options{})
	path := server.Export(t, "verify")
	g := &ground{pool: server.Dir(path), kinds: []kind{ext4, xfs, block, export}}
	g.serve(t, program(t), fmt.Sprintf("nfs: {server: %s, export: %s, init: true}", server.Address(), path))
	g.run(t)
}
