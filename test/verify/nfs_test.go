//go:build vm

package verify

import (
	"fmt"
	"testing"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/backendtest/targets"
	"github.com/trivet-csi/trivet/internal/testenv/nfsd"
	"github.com/trivet-csi/trivet/pool"
)

// TestNFS runs histories in a pool on an export.
func TestNFS(t *testing.T) {
	server := nfsd.Start(t, nfsd.Options{})
	path := server.Export(t, "verify")
	g := &testDriver{pool: server.Dir(path), kinds: targets.On(pool.KindExport, backendtest.Snapshots)}
	g.serve(t, program(t), fmt.Sprintf("nfs: {server: %s, export: %s, init: true}", server.Address(), path))
	g.run(t)
}
