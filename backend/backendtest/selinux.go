package backendtest

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/trivet-csi/trivet/linux/mount"
)

// SELinux contexts of the files of two pods.
const (
	oneContext   = "system_u:object_r:container_file_t:s0:c1,c2"
	otherContext = "system_u:object_r:container_file_t:s0:c3,c4"
)

// withContext returns a capability for the kind with an SELinux context, as the kubelet adds it to the mount flags.
func (k Kind) withContext(context string) *csi.VolumeCapability {
	return k.Capability(k.widestMode(), "noatime", fmt.Sprintf("context=%q", context))
}

// testSELinux: a volume is mounted with the SELinux context of the request, except a directory of a node, which has no
// filesystem of its own. On a node without SELinux the context is refused. A refused volume can be staged without one.
func testSELinux(t *testing.T, d *Driver, kind Kind) {
	l := newVolume(t, d, kind, kind.widestMode())
	l.cap = kind.withContext(oneContext)
	enabled := !errors.Is(mount.ProbeContext(oneContext), mount.ErrNoSELinux)
	switch {
	case kind.Has(Directory | NodeLocal):
		wantCode(t, l.stage(t.Context()), codes.InvalidArgument, "mount_flags", oneContext)
	case enabled:
		testContext(t, l)
		return
	default:
		wantCode(t, l.stage(t.Context()), codes.FailedPrecondition, oneContext, "SELinux is not enabled")
	}
	if n := mountsAt(t, l.staging); n != 0 {
		t.Errorf("got %d mounts after the context was refused, want none", n)
	}
	l.cap = kind.Capability(kind.widestMode())
	l.stageAndPublish(t)
}

// testContext tests a volume with a filesystem of its own on a node with SELinux.
func testContext(t *testing.T, l *testVolume) {
	t.Helper()
	kind := l.kind
	for _, unknown := range []string{"system_u:object_r:no_such_type_t:s0", "container_file_t"} {
		l.cap = kind.withContext(unknown)
		wantCode(t, l.stage(t.Context()), codes.InvalidArgument, unknown, "the SELinux policy of this node")
	}
	l.cap = kind.withContext(oneContext)
	if err := l.stage(t.Context()); kind.FSType == "btrfs" && err != nil { // before the new mount API of btrfs
		wantCode(t, err, codes.InvalidArgument, oneContext, "no SELinux context for btrfs", "seLinuxMount: false")
		return
	}
	l.stageAndPublish(t)
	write(t, l.data(l.target), pattern(130))
	wantLabel(t, l.target, oneContext)
	wantLabel(t, l.data(l.target), oneContext)
	for _, same := range []string{oneContext, "system_u:object_r:container_file_t:s0:c2,c1", "system_u:object_r:svirt_sandbox_file_t:s0:c1,c2"} {
		l.cap = kind.withContext(same)
		l.stageAndPublish(t)
	}

	second := filepath.Join(filepath.Dir(l.target), "second")
	l.cap = kind.withContext(otherContext)
	wantCode(t, l.stage(t.Context()), codes.AlreadyExists, oneContext, otherContext)
	wantCode(t, l.publish(t.Context()), codes.AlreadyExists, oneContext, otherContext)
	for _, readOnly := range []bool{false, true} {
		wantCode(t, l.publishAt(t.Context(), second, readOnly), codes.FailedPrecondition, oneContext, otherContext)
	}
	l.cap = kind.Capability(kind.widestMode(), fmt.Sprintf("context=%q", oneContext), fmt.Sprintf("context=%q", otherContext))
	wantCode(t, l.stage(t.Context()), codes.InvalidArgument, oneContext, otherContext, "seLinuxMount: false")
	if kind.Has(Filesystem) {
		testContextElsewhere(t, l)
	}

	l.cap = kind.withContext(oneContext)
	must(t, l.publishAt(t.Context(), second, true))
	wantLabel(t, l.data(second), oneContext)
	must(t, l.unpublishAt(t.Context(), second))
	l.unpublishAndUnstage(t)

	l.cap = kind.withContext(otherContext)
	l.stageAndPublish(t)
	wantLabel(t, l.data(l.target), otherContext)
	wantContent(t, l.data(l.target), pattern(130))
	l.unpublishAndUnstage(t)
	if kind.Has(Clones) {
		t.Run("clone", func(t *testing.T) { testContextOfClone(t, l) })
	}

	l.cap = kind.Capability(kind.widestMode(), "noatime")
	l.stageAndPublish(t)
	l.cap = kind.withContext(oneContext)
	wantCode(t, l.stage(t.Context()), codes.AlreadyExists, "(none)", oneContext)
}

// testContextElsewhere: a staged volume is refused at another staging path, also with another context or without one.
func testContextElsewhere(t *testing.T, l *testVolume) {
	t.Helper()
	second := *l
	second.staging = filepath.Join(filepath.Dir(l.staging), "elsewhere")
	must(t, os.Mkdir(second.staging, 0o755))
	for _, c := range []*csi.VolumeCapability{l.kind.withContext(oneContext), l.kind.withContext(otherContext), l.kind.Capability(l.kind.widestMode())} {
		second.cap = c
		wantCode(t, second.stage(t.Context()), codes.FailedPrecondition, l.staging, "unstage")
	}
	if n := mountsAt(t, second.staging); n != 0 {
		t.Errorf("got %d mounts at the second staging path, want none", n)
	}
}

// testContextOfClone: a volume and its clone have different contexts at the same time.
func testContextOfClone(t *testing.T, l *testVolume) {
	clone, _ := newVolumeFor(t, l.d, l.kind, &csi.CreateVolumeRequest{
		CapacityRange: &csi.CapacityRange{RequiredBytes: gib}, VolumeCapabilities: []*csi.VolumeCapability{l.kind.withContext(otherContext)}, Parameters: l.kind.Parameters(),
		VolumeContentSource: &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: l.id}}},
	})
	l.cap = l.kind.withContext(oneContext)
	l.stageAndPublish(t)
	clone.stageAndPublish(t)
	wantLabel(t, l.data(l.target), oneContext)
	wantLabel(t, clone.data(clone.target), otherContext)
	l.unpublishAndUnstage(t)
}

// wantLabel fails the test unless a file has an SELinux label.
func wantLabel(t *testing.T, path, want string) {
	t.Helper()
	label := make([]byte, 256)
	n, err := unix.Getxattr(path, "security.selinux", label)
	if got := strings.TrimRight(string(label[:max(0, n)]), "\x00"); err != nil || got != want {
		t.Errorf("%s: got the label %q, %v, want %q", path, got, err, want)
	}
}
