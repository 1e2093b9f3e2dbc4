//go:build vm

package verify

import (
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
	config := pool.Config{NFS: &pool.NFS{Server: server.Address(), Export: path, Init: true}, Overcommit: 100}
	g := &testDriver{medium: backendtest.Medium{Config: config, Dir: server.Dir(path)}, kinds: targets.On(pool.KindExport, backendtest.Snapshots)}
	g.serve(t, program(t))
	g.run(t)
}
