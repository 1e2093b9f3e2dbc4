package backendtest

import (
	"bytes"
	"crypto/sha256"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/trivet-csi/trivet/internal/testenv"
)

// pattern returns 3 MiB of random content that depends only on the seed.
func pattern(seed uint64) []byte {
	b := make([]byte, 3<<20)
	key := [32]byte{}
	copy(key[:], sha256.New().Sum([]byte{byte(seed), byte(seed >> 8)}))
	_, _ = rand.NewChaCha8(key).Read(b)
	return b
}

// write durably writes content to a file or device.
func write(t *testing.T, path string, content []byte) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY|createUnlessDevice(path), 0o644)
	must(t, err)
	defer f.Close()
	_, err = f.Write(content)
	must(t, err)
	must(t, f.Sync())
}

// createUnlessDevice returns the flags for os.OpenFile that create or truncate path, unless it is a device.
func createUnlessDevice(path string) int {
	if isDevice(path) {
		return 0
	}
	return os.O_CREATE | os.O_TRUNC
}

// wantContent fails the test unless path begins with content.
func wantContent(t *testing.T, path string, content []byte) {
	t.Helper()
	f, err := os.Open(path)
	must(t, err)
	defer f.Close()
	got := make([]byte, len(content))
	if _, err := f.ReadAt(got, 0); err != nil || !bytes.Equal(got, content) {
		t.Errorf("%s does not begin with the written content: %v", path, err)
	}
}

// testContents: a volume shows its content at a second target, and keeps it when it is unstaged and when the
// driver restarts.
func testContents(t *testing.T, d *Driver, kind Kind) {
	l := newVolume(t, d, kind, multiWriter)
	content := pattern(1)
	l.stageAndPublish(t)
	write(t, l.data(l.target), content)
	second := filepath.Join(t.TempDir(), "second")
	must(t, l.publishAt(t.Context(), second, false))
	wantContent(t, l.data(second), content)
	must(t, l.unpublishAt(t.Context(), second))
	d.Restart(t)
	wantContent(t, l.data(l.target), content)
	l.stageAndPublish(t) // repeated, after the restart
	wantContent(t, l.data(l.target), content)
	l.unpublishAndUnstage(t)
	d.Restart(t)
	l.stageAndPublish(t)
	wantContent(t, l.data(l.target), content)
	l.unpublishAndUnstage(t)
	l.stageAndPublish(t)
	wantContent(t, l.data(l.target), content)
}

// testReboot removes mounts and devices without the driver, as a reboot does. The volume can be staged again
// with its content.
func testReboot(t *testing.T, d *Driver, kind Kind) {
	l := newVolume(t, d, kind, kind.widestMode())
	l.stageAndPublish(t)
	content := pattern(2)
	write(t, l.data(l.target), content)
	devices := devicesOf(t, l)
	disk := ""
	if kind.Has(WholeDisk) {
		disk = l.disk(t)
	}
	d.Stop(t)
	testenv.Run(t, "umount", l.target)
	if !kind.Block() {
		testenv.Run(t, "umount", l.staging)
	}
	if kind.Has(Encrypted | Block) {
		testenv.Run(t, "dmsetup", "remove", l.mappedName())
	}
	if kind.Has(Encrypted) {
		must(t, os.Remove(devices[0])) // the device node, which the driver has created
	}
	await(t, "the container to be closed", func() bool { return !kind.Has(Encrypted) || !l.isOpen() })
	switch {
	case kind.Has(Logical):
		testenv.Run(t, "lvm", "vgchange", "-an", d.volumeGroup())
		must(t, os.Remove(l.diskNode())) // the device node, which the driver has created
	case kind.Has(WholeDisk):
		testenv.Run(t, "delpart", "/dev/"+disk, "1")
		must(t, os.Remove(l.diskNode())) // the device node, which the driver has created
	case kind.Has(Image | Block):
		testenv.Run(t, "losetup", "-d", devices[0])
	}
	d.start(t)
	l.stageAndPublish(t)
	wantContent(t, l.data(l.target), content)
	if kind.Has(Placed) {
		wantContent(t, l.data(l.directory()), content)
	}
}

// deviceOf returns the device of a staged volume, which must have exactly one.
func deviceOf(t *testing.T, l *testVolume) string {
	t.Helper()
	devices := devicesOf(t, l)
	if len(devices) != 1 {
		t.Fatalf("got devices %q of the volume, want one", devices)
	}
	return devices[0]
}

// devicesOf returns the devices that a volume has on the node, found without the driver.
func devicesOf(t *testing.T, l *testVolume) []string {
	t.Helper()
	image := l.image()
	switch {
	case l.kind.Has(Encrypted) && l.isOpen():
		return []string{l.mapped()}
	case l.kind.Has(WholeDisk), l.kind.Has(Logical):
		if _, err := os.Stat(l.diskNode()); err != nil {
			return nil
		}
		return []string{l.diskNode()}
	case !l.kind.Has(Image) && !l.kind.Has(Encrypted):
		return nil
	case l.kind.Has(Shared):
		if image = l.mountedImage(t); image == "" {
			return nil
		}
	}
	return strings.Fields(testenv.Run(t, "losetup", "-n", "-O", "NAME", "-j", image))
}

// mountedImage returns the path of a volume's image in a shared pool, below the driver's own mount of the
// volume's folder. The path is empty if that mount does not exist.
func (l *testVolume) mountedImage(t *testing.T) string {
	t.Helper()
	table, err := os.ReadFile("/proc/self/mountinfo")
	must(t, err)
	for line := range strings.Lines(string(table)) {
		words := strings.Fields(line)
		if at := words[4]; strings.HasPrefix(at, l.d.privateMounts()) && strings.Contains(line, "/volumes/"+l.name()+" ") {
			return filepath.Join(at, "image")
		}
	}
	return ""
}

// wantNoDevice fails the test if the volume still has a device after unstage.
func wantNoDevice(t *testing.T, l *testVolume) {
	t.Helper()
	if left := devicesOf(t, l); len(left) > 0 {
		t.Errorf("got devices %q after unstage, want none", left)
	}
}

// image is the path of the volume's image.
func (l *testVolume) image() string {
	return filepath.Join(l.d.Pool(), "volumes", l.name(), "image")
}

// mountsAt counts the mounts at a path.
func mountsAt(t *testing.T, path string) int {
	t.Helper()
	table, err := os.ReadFile("/proc/self/mountinfo")
	must(t, err)
	n := 0
	for line := range strings.Lines(string(table)) {
		if strings.Fields(line)[4] == path {
			n++
		}
	}
	return n
}

// testReadOnly: a volume refuses writes if NodePublishVolume, ControllerPublishVolume or the access mode makes
// it read-only. Another writable target of the volume still accepts writes.
func testReadOnly(t *testing.T, d *Driver, kind Kind) {
	l := newVolume(t, d, kind, multiWriter)
	l.stageAndPublish(t)
	content := pattern(3)
	write(t, l.data(l.target), content)
	dir := t.TempDir()
	for name, publish := range map[string]func(target string) error{
		"request": func(target string) error { return l.publishAt(t.Context(), target, true) },
		"controller": func(target string) error {
			published, err := d.Control.ControllerPublishVolume(t.Context(), &csi.ControllerPublishVolumeRequest{
				VolumeId: l.id, NodeId: Node, VolumeCapability: l.cap, Readonly: true,
			})
			must(t, err)
			_, err = d.Node.NodePublishVolume(t.Context(), &csi.NodePublishVolumeRequest{
				VolumeId: l.id, StagingTargetPath: l.staging, TargetPath: target, VolumeCapability: l.cap,
				PublishContext: published.GetPublishContext(),
			})
			return err
		},
	} {
		target := filepath.Join(dir, name)
		must(t, publish(target))
		wantRefusesWrites(t, l.data(target))
		wantContent(t, l.data(target), content)
		write(t, l.data(l.target), content)
		must(t, l.unpublishAt(t.Context(), target))
	}
	must(t, l.unpublishAt(t.Context(), l.target))
	must(t, l.unstage(t.Context()))
	l.cap = kind.Capability(readerOnly)
	l.stageAndPublish(t)
	wantRefusesWrites(t, l.data(l.target))
	wantContent(t, l.data(l.target), content)
}

// wantRefusesWrites fails the test if the file or device at path accepts a write, or if the
// directory of a file accepts a new file.
func wantRefusesWrites(t *testing.T, path string) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err == nil {
		_, err = f.Write(make([]byte, 4096))
		if err == nil {
			err = f.Sync()
		}
		_ = f.Close()
	}
	if err == nil {
		t.Errorf("%s accepted a write, want it read-only", path)
	}
	if _, err := os.Create(filepath.Join(filepath.Dir(path), "new")); err == nil && !isDevice(path) {
		t.Errorf("%s accepted a new file, want it read-only", filepath.Dir(path))
	}
}

func isDevice(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode()&os.ModeDevice != 0
}

// testInUse: a published volume is neither deleted nor unstaged, and a volume that a process uses is not
// unpublished.
func testInUse(t *testing.T, d *Driver, kind Kind) {
	l := newVolume(t, d, kind, multiWriter)
	l.stageAndPublish(t)
	content := pattern(4)
	write(t, l.data(l.target), content)
	wantCode(t, l.delete(t.Context()), codes.FailedPrecondition, "in use")
	wantCode(t, l.unstage(t.Context()), codes.FailedPrecondition, l.target)
	wantContent(t, l.data(l.target), content)
	must(t, l.unpublishAt(t.Context(), l.target))
	must(t, l.unstage(t.Context()))
	wantNoDevice(t, l)
	must(t, l.unstage(t.Context()))
	l.stageAndPublish(t)
	wantContent(t, l.data(l.target), content)
	if !kind.Block() {
		f, err := os.Open(l.data(l.target))
		must(t, err)
		wantCode(t, l.unpublishAt(t.Context(), l.target), codes.FailedPrecondition, l.target, syscall.EBUSY.Error())
		must(t, f.Close())
	}
}
