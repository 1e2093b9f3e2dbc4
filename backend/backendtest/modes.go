package backendtest

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/trivet-csi/trivet/internal/testenv"
)

// testAccessModes: only some access modes allow a second target of a volume.
func testAccessModes(t *testing.T, d *Driver, kind Kind) {
	for _, tc := range []struct {
		mode   csi.VolumeCapability_AccessMode_Mode
		second codes.Code // of NodePublishVolume at a second target
	}{
		{multiWriter, codes.OK},
		{singleWriter, codes.FailedPrecondition},
		{writer, codes.FailedPrecondition},
		{readerOnly, codes.FailedPrecondition},
	} {
		t.Run(tc.mode.String(), func(t *testing.T) {
			l := newVolume(t, d, kind, tc.mode)
			l.stageAndPublish(t)
			must(t, l.publish(t.Context())) // the same path again
			second := filepath.Join(t.TempDir(), "second")
			err := l.publishAt(t.Context(), second, false)
			if tc.second == codes.OK {
				must(t, err)
				must(t, l.unpublishAt(t.Context(), second))
				return
			}
			wantCode(t, err, tc.second, l.target, tc.mode.String())
			if _, err := os.Lstat(second); !os.IsNotExist(err) {
				t.Errorf("the refused publish left %s behind: %v", second, err)
			}
		})
	}
	t.Run("path with a link", func(t *testing.T) { testThroughLink(t, d, kind) })
	t.Run("directory visible at two paths", func(t *testing.T) { testSeenTwice(t, d, kind) })
	refused := []csi.VolumeCapability_AccessMode_Mode{csi.VolumeCapability_AccessMode_MULTI_NODE_SINGLE_WRITER, manyReaders, manyWriters}
	if kind.Has(Shared | Directory) {
		refused = refused[:1]
	}
	for _, mode := range refused {
		t.Run(mode.String(), func(t *testing.T) { testRefusedMode(t, d, kind, mode) })
	}
}

// testThroughLink: a path with a symbolic link counts as the path to which the link leads.
func testThroughLink(t *testing.T, d *Driver, kind Kind) {
	l := newVolume(t, d, kind, singleWriter)
	link := filepath.Join(t.TempDir(), "link")
	must(t, os.Symlink(filepath.Dir(l.staging), link))
	l.staging, l.target = filepath.Join(link, "staging"), filepath.Join(link, "target")
	l.stageAndPublish(t)
	l.stageAndPublish(t)
	wantCode(t, l.publishAt(t.Context(), filepath.Join(link, "second"), false), codes.FailedPrecondition, "allows one path")
}

// testSeenTwice: a mount in a directory that is visible at two paths, as the host's root is in a container, counts
// once.
func testSeenTwice(t *testing.T, d *Driver, kind Kind) {
	shared, again := t.TempDir(), t.TempDir()
	testenv.Run(t, "mount", "-t", "tmpfs", "tmpfs", shared)
	t.Cleanup(func() { testenv.Run(t, "umount", shared) })
	testenv.Run(t, "mount", "--make-shared", shared)
	testenv.Run(t, "mount", "--bind", shared, again)
	t.Cleanup(func() { testenv.Run(t, "umount", again) })
	l := newVolume(t, d, kind, singleWriter)
	l.staging, l.target = filepath.Join(shared, "staging"), filepath.Join(shared, "target")
	must(t, os.Mkdir(l.staging, 0o755))
	l.stageAndPublish(t)
	l.stageAndPublish(t)
	if seen := mountsAt(t, filepath.Join(again, "target")); seen != 1 {
		t.Errorf("got %d mounts of the target at the other path, want 1 for a valid test", seen)
	}
	wantCode(t, l.publishAt(t.Context(), filepath.Join(shared, "second"), false), codes.FailedPrecondition, "allows one path")
	l.unpublishAndUnstage(t)
}

// testMultiNode publishes a volume in the modes for several nodes.
func testMultiNode(t *testing.T, d *Driver, kind Kind) {
	for _, mode := range []csi.VolumeCapability_AccessMode_Mode{manyReaders, manyWriters} {
		t.Run(mode.String(), func(t *testing.T) { testMultiNodeMode(t, d, kind, mode) })
	}
}

// testRefusedMode: all calls refuse a mode that the kind does not support.
func testRefusedMode(t *testing.T, d *Driver, kind Kind, mode csi.VolumeCapability_AccessMode_Mode) {
	l := newVolume(t, d, kind, multiWriter)
	c := kind.Capability(mode)
	_, err := d.Control.CreateVolume(t.Context(), &csi.CreateVolumeRequest{Name: newName(t), VolumeCapabilities: []*csi.VolumeCapability{c}, Parameters: kind.Parameters()})
	wantCode(t, err, codes.InvalidArgument, mode.String())
	valid, err := d.Control.ValidateVolumeCapabilities(t.Context(), &csi.ValidateVolumeCapabilitiesRequest{
		VolumeId: l.id, VolumeCapabilities: []*csi.VolumeCapability{c},
	})
	if err != nil || valid.GetConfirmed() != nil || !strings.Contains(valid.GetMessage(), mode.String()) {
		t.Errorf("ValidateVolumeCapabilities: got %v, %v; want a refusal that names the mode", valid, err)
	}
	l.cap = c
	wantCode(t, l.publishTo(t.Context(), Node), codes.FailedPrecondition, mode.String())
	wantCode(t, l.stage(t.Context()), codes.FailedPrecondition, mode.String())
	wantCode(t, l.publish(t.Context()), codes.FailedPrecondition, mode.String())
}

// testStageAgain: repeating NodeStageVolume with the same arguments succeeds, with other arguments it fails.
func testStageAgain(t *testing.T, d *Driver, kind Kind) {
	l := newVolume(t, d, kind, multiWriter)
	must(t, l.stage(t.Context()))
	must(t, l.stage(t.Context()))
	other := kind.otherFilesystem()
	restage := func(c *csi.VolumeCapability, staging string) error {
		_, err := d.Node.NodeStageVolume(t.Context(), &csi.NodeStageVolumeRequest{VolumeId: l.id, StagingTargetPath: staging, VolumeCapability: c})
		return err
	}
	wantCode(t, restage(other.Capability(multiWriter), l.staging), codes.FailedPrecondition, "volume_capability")
	if kind.Block() {
		return
	}
	wantCode(t, restage(kind.Capability(readerOnly), l.staging), codes.AlreadyExists, l.staging)
	wantCode(t, restage(kind.Capability(multiWriter, "noexec"), l.staging), codes.AlreadyExists, l.staging)
	says := "block true"
	if kind.Has(Directory) {
		says = "raw device"
	}
	wantCode(t, restage(Kind{}.Capability(multiWriter), l.staging), codes.FailedPrecondition, says)
}

// testStageElsewhere: a staged filesystem cannot be staged at a second path.
func testStageElsewhere(t *testing.T, d *Driver, kind Kind) {
	l := newVolume(t, d, kind, multiWriter)
	must(t, l.stage(t.Context()))
	elsewhere := *l
	elsewhere.staging = t.TempDir()
	wantCode(t, elsewhere.stage(t.Context()), codes.FailedPrecondition, l.staging)
	if n := mountsAt(t, elsewhere.staging); n != 0 {
		t.Errorf("got %d mounts after the refused stage, want none", n)
	}
	deviceOf(t, l) // fails the test unless the volume has one device
}

// testPublishAgain: repeating NodePublishVolume with the same arguments succeeds, with other arguments or before
// staging it fails.
func testPublishAgain(t *testing.T, d *Driver, kind Kind) {
	l := newVolume(t, d, kind, multiWriter)
	wantCode(t, l.publish(t.Context()), codes.FailedPrecondition, "not staged")
	l.stageAndPublish(t)
	must(t, l.publish(t.Context()))
	if n := mountsAt(t, l.target); n != 1 {
		t.Errorf("got %d mounts at the target, want 1", n)
	}
	wantCode(t, l.publishAt(t.Context(), l.target, true), codes.AlreadyExists, l.target)
	other := newVolume(t, d, kind, multiWriter)
	must(t, other.stage(t.Context()))
	wantCode(t, other.publishAt(t.Context(), l.target, false), codes.AlreadyExists, l.target)
	wantCode(t, other.unpublishAt(t.Context(), l.target), codes.FailedPrecondition, "it stays")
	_, err := d.Node.NodePublishVolume(t.Context(), &csi.NodePublishVolumeRequest{VolumeId: l.id, TargetPath: l.target, VolumeCapability: l.cap})
	wantCode(t, err, codes.FailedPrecondition, "staging_target_path")
	if !kind.Block() {
		mixed := *other
		mixed.staging = l.staging // l is staged there, not other
		wantCode(t, mixed.publishAt(t.Context(), filepath.Join(t.TempDir(), "x"), false), codes.FailedPrecondition, "not staged")
	}
	must(t, l.unpublishAt(t.Context(), l.target))
	must(t, l.unpublishAt(t.Context(), l.target))
	if _, err := os.Lstat(l.target); !os.IsNotExist(err) {
		t.Errorf("unpublish did not remove the target: %v", err)
	}
}

// testMountFlags: a mount has the flags of the class. Invalid flags are refused, and leave no device.
func testMountFlags(t *testing.T, d *Driver, kind Kind) {
	l := newVolume(t, d, kind, multiWriter)
	for _, flag := range []string{"no-such-option", "noatim", "bind", "remount", "loop", "errors=panic", "fatal_errors=panic", "abort", "sb=8193", "journal_checksum", "norecovery", "device=/dev/null"} {
		l.cap = kind.Capability(multiWriter, flag)
		wantCode(t, l.stage(t.Context()), codes.InvalidArgument, "mount_flags", flag)
		if left := devicesOf(t, l); len(left) > 0 {
			t.Errorf("got devices %q after flag %s was refused, want none", left, flag)
		}
	}
	l.cap = kind.Capability(multiWriter, "noexec", "nodev,noatime", "defaults", "lazytime")
	l.stageAndPublish(t)
	for _, path := range []string{l.staging, l.target} {
		options := testenv.Run(t, "findmnt", "-n", "-o", "OPTIONS", path)
		for _, want := range []string{"noexec", "nodev", "noatime", "lazytime"} {
			if !strings.Contains(options, want) {
				t.Errorf("%s is mounted with options %s, want %s among them", path, options, want)
			}
		}
	}
	l.stageAndPublish(t)
}
