//go:build vm

package nfs

import (
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/trivet-csi/trivet/internal/retry"
	"github.com/trivet-csi/trivet/internal/testenv/nfsd"
)

// TestOutageLock: an image that was force-unstaged during an outage can be used by another node
// afterwards, although the first node still uses another image of the same server and keeps its client
// identity. The test closes the first node's connections, so that no delayed request reaches the
// server.
func TestOutageLock(t *testing.T) {
	s := nfsd.Start(t, nfsd.Options{})
	pools := nfsPool("nas", s, s.Export(t, "nas"), "outage: 10s")
	first, second := start(t, s.Node(t, "node-1"), "node-1", pools), start(t, s.Node(t, "node-2"), "node-2", pools)
	eventually(t, func() error { return first.tryDirectory(t, "nas", "first") }) // until the pool is open
	must(t, first.delete(t, first.directory(t, "nas", "first")))
	stays := first.image(t, "nas", "stays", "ext4", 64*mib)
	first.up(t, stays)
	w := startWriter(t, first.file(stays, "records"))
	w.awaitProgress(t)
	volumes := []*vol{
		first.image(t, "nas", "formatted", "ext4", 64*mib), first.create(t, "raw", 8*mib, rawDevice(), imageIn("nas")),
		first.create(t, "encrypted", 64*mib, filesystem("ext4", oneNode), encryptedIn("nas")), first.create(t, "encrypted-raw", 8*mib, rawDevice(), encryptedIn("nas")),
	}
	for _, v := range volumes {
		first.up(t, v)
		must(t, first.unpublish(t, v))
	}

	first.Cut(t)
	for _, v := range volumes {
		err := retry.For(t.Context(), waitTimeout, func() (bool, error) {
			err := first.unstage(t, v)
			return status.Code(err) == codes.Unavailable, err
		})
		must(t, err)
	}
	if out, err := first.Command("ss", "--kill", "--tcp", "dst", s.Address()).CombinedOutput(); err != nil {
		t.Fatalf("ss: %v\n%s", err, out)
	}
	first.Restore(t)
	w.awaitProgress(t)

	for _, v := range volumes {
		eventually(t, func() error { return first.controllerUnpublish(t, v, "node-1") })
		must(t, second.controllerPublish(t, v))
		eventually(t, func() error { return second.stage(t, v) })
		must(t, second.unstage(t, v))
		must(t, second.controllerUnpublish(t, v, "node-2"))
		must(t, second.delete(t, v))
	}
	w.finish(t)
	first.remove(t, stays)
	wantEmpty(t, s, "/nas")
}

// rawDevice returns the capability of a block volume.
func rawDevice() *csi.VolumeCapability {
	return &csi.VolumeCapability{
		AccessMode: &csi.VolumeCapability_AccessMode{Mode: oneNode},
		AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}},
	}
}
