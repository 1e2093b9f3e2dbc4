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
)

// reasons are the conditions of a volume that the node and the controller report.
func (l *life) reasons(t *testing.T) (node, control []string) {
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
			t.Errorf("the list says %v, the volume alone %v", e, c)
		}
	}
	return node, control
}

func (l *life) wantReasons(t *testing.T, node, control []string) {
	t.Helper()
	gotNode, gotControl := l.reasons(t)
	if !slices.Equal(gotNode, node) || !slices.Equal(gotControl, control) {
		t.Errorf("the node finds %q, want %q; the controller %q, want %q", gotNode, node, gotControl, control)
	}
}

// testHealthy: no condition is reported for a healthy volume and its storage.
func testHealthy(t *testing.T, d *Driver, kind Kind) {
	l := newLife(t, d, kind, kind.many())
	l.up(t)
	l.wantReasons(t, nil, nil)
	storage, err := d.Node.NodeGetStorageHealth(t.Context(), &csi.NodeGetStorageHealthRequest{})
	if err != nil || len(storage.GetBackendHealth()) > 0 {
		t.Errorf("NodeGetStorageHealth: %v, %v", storage, err)
	}
}

// testImageHealth: a missing image, a missing device and a damaged filesystem are reported.
func testImageHealth(t *testing.T, d *Driver, kind Kind) {
	l := newLife(t, d, kind, multiWriter)
	l.up(t)
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

// breakFilesystem makes the mounted filesystem fail. The driver must report it, and a second
// stage must repair it.
func (l *life) breakFilesystem(t *testing.T) {
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
		// The kernel counts the error a moment later.
		await(t, "the error to be reported", func() bool { node, _ := l.reasons(t); return len(node) > 0 })
		l.wantReasons(t, []string{"FilesystemErrors"}, nil)
	case "btrfs":
		l.corrupt(t, content)
		l.wantReasons(t, []string{"FilesystemErrors"}, nil)
		return // btrfs counts them for ever
	}
	l.down(t)
	l.up(t)
	l.wantReasons(t, nil, nil)
	wantContent(t, l.data(l.target), content)
	if l.kind.FSType == "ext4" {
		l.remountReadOnly(t)
	}
}

// corrupt changes a byte of a file on the unmounted image, and reads the file.
func (l *life) corrupt(t *testing.T, content []byte) {
	t.Helper()
	l.down(t)
	image, err := os.ReadFile(l.image())
	must(t, err)
	at := bytes.Index(image, content[:4096])
	if at < 0 {
		t.Fatal("the file is not on the image")
	}
	f, err := os.OpenFile(l.image(), os.O_WRONLY, 0)
	must(t, err)
	_, err = f.WriteAt([]byte{^content[0]}, int64(at))
	must(t, errors.Join(err, f.Sync(), f.Close()))
	l.up(t)
	if _, err := os.ReadFile(l.data(l.target)); !errors.Is(err, syscall.EIO) {
		t.Errorf("a file with a wrong checksum: %v", err)
	}
}

// remountReadOnly makes an ext4 remount itself read-only after an error. Kernels between the
// stable ones of late 2024 and Linux 6.14 do not show that.
func (l *life) remountReadOnly(t *testing.T) {
	t.Helper()
	l.down(t)
	l.cap = l.kind.Capability(multiWriter, "errors=remount-ro")
	l.up(t)
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
	l := newLife(t, d, kind, multiWriter)
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
				t.Errorf("the list has %v, the volume alone %v", e, v)
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
		t.Errorf("published to %q", got)
	}
	wantCode(t, l.delete(t.Context()), codes.FailedPrecondition, Node)
	unpublish("node-2")
	if got := nodes(); len(got) != 1 {
		t.Errorf("after unpublishing from another node, it is published to %q", got)
	}
	unpublish(Node)
	unpublish(Node)
	must(t, publish(Node, true))
	unpublish("") // everywhere
	if got := nodes(); len(got) != 0 {
		t.Errorf("after unpublishing, it is published to %q", got)
	}
}
