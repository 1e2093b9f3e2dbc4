package backendtest

import (
	"bytes"
	"errors"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/sys"
)

// reasons returns the reasons of the volume's conditions that the node and the controller report.
func (l *testVolume) reasons(t *testing.T) (node, control []string) {
	t.Helper()
	n, err := l.d.Node.NodeGetVolumeHealth(t.Context(), &csi.NodeGetVolumeHealthRequest{
		VolumeId: l.id, VolumePublishPath: l.target, StagingTargetPath: l.staging,
	})
	must(t, err)
	for _, h := range n.GetVolumeHealth().GetHealthStatuses() {
		node = append(node, h.GetReason())
	}
	c, err := l.d.Control.ControllerGetVolumeHealth(t.Context(), &csi.ControllerGetVolumeHealthRequest{VolumeId: l.id})
	must(t, err)
	for _, h := range c.GetVolumeHealth().GetHealthStatuses() {
		control = append(control, h.GetReason())
	}
	list, err := l.d.Control.ControllerListVolumeHealth(t.Context(), &csi.ControllerListVolumeHealthRequest{})
	must(t, err)
	for _, e := range list.GetEntries() {
		if e.GetVolumeId() == l.id && e.String() != c.GetVolumeHealth().String() {
			t.Errorf("ControllerListVolumeHealth: got %v, want %v as from ControllerGetVolumeHealth", e, c)
		}
	}
	return node, control
}

// wantReasons fails the test unless the node and the controller report conditions with these reasons.
func (l *testVolume) wantReasons(t *testing.T, node, control []string) {
	t.Helper()
	gotNode, gotControl := l.reasons(t)
	if !slices.Equal(gotNode, node) || !slices.Equal(gotControl, control) {
		t.Errorf("got conditions %q of the node, want %q; got %q of the controller, want %q", gotNode, node, gotControl, control)
	}
}

// testHealthy: no condition is reported for a healthy volume and its storage.
func testHealthy(t *testing.T, d *Driver, kind Kind) {
	l := newVolume(t, d, kind, kind.widestMode())
	l.stageAndPublish(t)
	l.wantReasons(t, nil, nil)
	storage, err := d.Node.NodeGetStorageHealth(t.Context(), &csi.NodeGetStorageHealthRequest{})
	if err != nil || len(storage.GetBackendHealth()) > 0 {
		t.Errorf("NodeGetStorageHealth: got %v, %v; want no conditions", storage, err)
	}
}

// testImageHealth: a missing image, a missing device and a damaged filesystem are reported.
func testImageHealth(t *testing.T, d *Driver, kind Kind) {
	l := newVolume(t, d, kind, multiWriter)
	l.stageAndPublish(t)
	must(t, os.Rename(l.image(), l.image()+".away"))
	l.wantReasons(t, []string{"ImageMissing"}, []string{"ImageMissing"})
	wantCode(t, l.delete(t.Context()), codes.FailedPrecondition, "in use")
	must(t, os.Rename(l.image()+".away", l.image()))
	l.wantReasons(t, nil, nil)
	if kind.Block() {
		testenv.Run(t, "umount", l.target)
		testenv.Run(t, "losetup", "-d", deviceOf(t, l))
		l.wantReasons(t, []string{"DeviceDetached"}, nil)
		return
	}
	testenv.Run(t, "umount", l.target)
	l.wantReasons(t, []string{"NotMounted"}, nil)
	must(t, l.publish(t.Context()))
	l.wantReasons(t, nil, nil)
	l.breakFilesystem(t)
}

// breakFilesystem makes the mounted filesystem fail. The driver must report the failure, and the next stage must
// repair the filesystem.
func (l *testVolume) breakFilesystem(t *testing.T) {
	t.Helper()
	content := pattern(8)
	write(t, l.data(l.target), content)
	switch l.kind.FSType {
	case "xfs":
		testenv.Run(t, "xfs_io", "-x", "-c", "shutdown", l.target)
		l.wantReasons(t, []string{"FilesystemShutDown"}, nil)
	case "ext4":
		device := deviceOf(t, l)
		must(t, os.WriteFile("/sys/fs/ext4/"+device[len("/dev/"):]+"/trigger_fs_error", []byte("test"), 0))
		// The kernel counts the error with a delay.
		await(t, "the error to be reported", func() bool { node, _ := l.reasons(t); return len(node) > 0 })
		l.wantReasons(t, []string{"FilesystemErrors"}, nil)
	case "btrfs":
		l.corrupt(t, content)
		l.wantReasons(t, []string{"FilesystemErrors"}, nil)
		return // the error counter of btrfs is never reset
	}
	l.unpublishAndUnstage(t)
	l.stageAndPublish(t)
	l.wantReasons(t, nil, nil)
	wantContent(t, l.data(l.target), content)
	if l.kind.FSType == "ext4" {
		l.remountReadOnly(t)
	}
}

// corrupt changes a byte of a file on the unmounted image, and reads the file.
func (l *testVolume) corrupt(t *testing.T, content []byte) {
	t.Helper()
	l.unpublishAndUnstage(t)
	f, err := os.OpenFile(l.image(), os.O_RDWR, 0)
	must(t, err)
	_, err = f.WriteAt([]byte{^content[0]}, offsetOf(t, f, content[:4096]))
	must(t, errors.Join(err, f.Sync(), f.Close()))
	l.stageAndPublish(t)
	if _, err := os.ReadFile(l.data(l.target)); !errors.Is(err, syscall.EIO) {
		t.Errorf("reading a file with a wrong checksum: got %v, want EIO", err)
	}
}

// offsetOf returns the offset of a block in the data of a sparse file.
func offsetOf(t *testing.T, f *os.File, block []byte) int64 {
	t.Helper()
	info, err := f.Stat()
	must(t, err)
	must(t, sys.WriteBack(f))
	for from := int64(0); from < info.Size(); {
		start, stop, err := sys.NextData(f, from, info.Size())
		must(t, err)
		data := make([]byte, stop-start)
		_, err = f.ReadAt(data, start)
		must(t, err)
		if at := bytes.Index(data, block); at >= 0 {
			return start + int64(at)
		}
		from = stop
	}
	t.Fatalf("%s does not contain the block", f.Name())
	return 0
}

// remountReadOnly makes ext4 remount itself read-only after an error. Stable kernels from late 2024 to Linux 6.14
// do not show this in the mount options.
func (l *testVolume) remountReadOnly(t *testing.T) {
	t.Helper()
	l.unpublishAndUnstage(t)
	l.cap = l.kind.Capability(multiWriter, "errors=remount-ro")
	l.stageAndPublish(t)
	device := deviceOf(t, l)
	must(t, os.WriteFile("/sys/fs/ext4/"+device[len("/dev/"):]+"/trigger_fs_error", []byte("test"), 0))
	await(t, "the error to be reported", func() bool { node, _ := l.reasons(t); return len(node) > 0 })
	want := []string{"FilesystemErrors"}
	if options := "," + testenv.Run(t, "findmnt", "-n", "-o", "FS-OPTIONS", l.target) + ","; strings.Contains(options, ",ro,") || strings.Contains(options, ",emergency_ro,") {
		want = append(want, "FilesystemReadOnly")
	}
	l.wantReasons(t, want, nil)
}

// testPublication: controller-publications are recorded, listed and removed.
func testPublication(t *testing.T, d *Driver, kind Kind) {
	l := newVolume(t, d, kind, multiWriter)
	publish := func(node string, readOnly bool) error {
		_, err := d.Control.ControllerPublishVolume(t.Context(), &csi.ControllerPublishVolumeRequest{
			VolumeId: l.id, NodeId: node, VolumeCapability: l.cap, Readonly: readOnly,
		})
		return err
	}
	nodes := func() []string {
		v, err := d.Control.ControllerGetVolume(t.Context(), &csi.ControllerGetVolumeRequest{VolumeId: l.id})
		must(t, err)
		list, err := d.Control.ListVolumes(t.Context(), &csi.ListVolumesRequest{})
		must(t, err)
		for _, e := range list.GetEntries() {
			if e.GetVolume().GetVolumeId() == l.id && !slices.Equal(e.GetStatus().GetPublishedNodeIds(), v.GetStatus().GetPublishedNodeIds()) {
				t.Errorf("ListVolumes: got %v, want the nodes of %v as from ControllerGetVolume", e, v)
			}
		}
		return v.GetStatus().GetPublishedNodeIds()
	}
	unpublish := func(node string) {
		must(t, l.unpublishFrom(t.Context(), node))
	}
	wantCode(t, publish("node-2", false), codes.NotFound, "node_id", "node-2")
	must(t, publish(Node, false))
	must(t, publish(Node, false))
	wantCode(t, publish(Node, true), codes.AlreadyExists, "readonly")
	d.Restart(t)
	if got := nodes(); !slices.Equal(got, []string{Node}) {
		t.Errorf("got published nodes %q, want %s", got, Node)
	}
	wantCode(t, l.delete(t.Context()), codes.FailedPrecondition, Node)
	unpublish("node-2")
	if got := nodes(); len(got) != 1 {
		t.Errorf("after unpublishing from another node: got published nodes %q, want %s", got, Node)
	}
	unpublish(Node)
	unpublish(Node)
	must(t, publish(Node, true))
	unpublish("") // from all nodes
	if got := nodes(); len(got) != 0 {
		t.Errorf("after unpublishing from all nodes: got published nodes %q, want none", got)
	}
}
