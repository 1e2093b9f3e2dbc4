package backendtest

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/linux/luks"
	"github.com/trivet-csi/trivet/linux/sys"
	"github.com/trivet-csi/trivet/volume"
)

// mappedName returns the name of the mapped device of an encrypted volume.
func (l *testVolume) mappedName() string {
	id := l.id
	if l.kind.Has(Shared) {
		id += "@" + Node
	}
	sum := sha256.Sum256([]byte(id))
	return "trivet-" + hex.EncodeToString(sum[:20])
}

// mapped returns the path of the mapped device of an encrypted volume.
func (l *testVolume) mapped() string { return "/dev/trivet/" + l.mappedName() }

// isOpen reports whether the mapped device of an encrypted volume exists.
func (l *testVolume) isOpen() bool {
	return exec.Command("dmsetup", "info", l.mappedName()).Run() == nil
}

// withContainer calls f with the path of the device in the container on a device or file, which is opened for the call.
func (l *testVolume) withContainer(t *testing.T, storage string, f func(path string)) {
	t.Helper()
	name := filepath.Base(t.TempDir()) + "-" + l.name()
	testenv.Run(t, "env", "DM_DISABLE_UDEV=1", "cryptsetup", "open", "--readonly", "--key-file", writtenKey(t), storage, name)
	f("/dev/mapper/" + name)
	testenv.Run(t, "env", "DM_DISABLE_UDEV=1", "cryptsetup", "close", name)
}

// secretsOf are the secrets of a request with a passphrase.
func secretsOf(passphrase string) map[string]string {
	return map[string]string{volume.SecretPassphrase: passphrase}
}

// stageWith stages a volume with secrets.
func (l *testVolume) stageWith(ctx context.Context, secrets map[string]string) error {
	other := *l
	other.secrets = secrets
	return other.stage(ctx)
}

// testPassphrase: a volume is staged only with its passphrase, which its first stage sets. Other secrets change nothing.
func testPassphrase(t *testing.T, d *Driver, kind Kind) {
	ctx := t.Context()
	l := newVolume(t, d, kind, multiWriter)
	missing := []map[string]string{{}, {"password": "x"}, {volume.SecretPassphrase: ""}}
	for _, secrets := range missing {
		wantCode(t, l.stageWith(ctx, secrets), codes.InvalidArgument, `"passphrase"`, volume.ParamNodeStageSecret)
	}
	if devices := devicesOf(t, l); len(devices) > 0 {
		t.Errorf("a refused stage has left the devices %q", devices)
	}
	long := secretsOf(strings.Repeat("x", luks.MaxKey+1))
	wantCode(t, l.stageWith(ctx, long), codes.InvalidArgument, fmt.Sprint(luks.MaxKey))
	var stages sync.WaitGroup
	errs := make([]error, 2)
	for i := range errs {
		stages.Go(func() { errs[i] = l.stage(ctx) })
	}
	stages.Wait()
	if errors.Join(errs...) != nil { // a call may find the volume locked by the other
		t.Logf("two stages at once: %v", errs)
		must(t, l.stage(ctx))
	}
	must(t, l.publish(ctx))
	write(t, l.data(l.target), pattern(90))
	l.unpublishAndUnstage(t)
	for _, secrets := range missing {
		wantCode(t, l.stageWith(ctx, secrets), codes.InvalidArgument, `"passphrase"`)
	}
	for _, wrong := range []string{"wrong", passphrase + "\n", passphrase[1:]} {
		wantCode(t, l.stageWith(ctx, secretsOf(wrong)), codes.Unauthenticated, "does not open volume", "nothing was changed")
	}
	if devices := devicesOf(t, l); len(devices) > 0 {
		t.Errorf("a refused stage has left the devices %q", devices)
	}
	l.stageAndPublish(t)
	wantContent(t, l.data(l.target), pattern(90))
	if _, err := l.expand(ctx, 2*gib); kind.Has(Divisible | Expand) {
		must(t, err)
		_, err = d.Node.NodeExpandVolume(ctx, &csi.NodeExpandVolumeRequest{VolumeId: l.id, VolumePath: l.target, Secrets: map[string]string{}})
		wantCode(t, err, codes.InvalidArgument, `"passphrase"`, volume.ParamExpandSecret)
		_, err = d.Node.NodeExpandVolume(ctx, &csi.NodeExpandVolumeRequest{VolumeId: l.id, VolumePath: l.target, Secrets: secretsOf("wrong")})
		wantCode(t, err, codes.Unauthenticated)
	}
	if strings.Contains(Log(), passphrase) {
		t.Error("the log contains the passphrase")
	}
}

// testRotation: a Secret with the previous passphrase replaces it at the next stage.
func testRotation(t *testing.T, d *Driver, kind Kind) {
	ctx := t.Context()
	l := newVolume(t, d, kind, multiWriter)
	l.stageAndPublish(t)
	write(t, l.data(l.target), pattern(91))
	l.unpublishAndUnstage(t)
	rotated := map[string]string{volume.SecretPassphrase: "new", volume.SecretPrevious: passphrase}
	wantCode(t, l.stageWith(ctx, map[string]string{volume.SecretPassphrase: "new", volume.SecretPrevious: "wrong"}), codes.Unauthenticated)
	for range 2 { // with the same Secret
		must(t, l.stageWith(ctx, rotated))
		must(t, l.publish(ctx))
		wantContent(t, l.data(l.target), pattern(91))
		l.unpublishAndUnstage(t)
	}
	wantCode(t, l.stage(ctx), codes.Unauthenticated)
	must(t, l.stageWith(ctx, secretsOf("new")))
}

// testCiphertext: the storage of a volume does not contain what was written to it. A deleted volume no longer has a header,
// also while another process still has its storage open.
func testCiphertext(t *testing.T, d *Driver, kind Kind) {
	l := newVolume(t, d, kind, multiWriter)
	l.stageAndPublish(t)
	secret := bytes.Repeat([]byte("a text that must not be readable"), 4096)
	write(t, l.data(l.target), secret)
	l.unpublishAndUnstage(t)
	check := func(path string) {
		storage, err := os.Open(path)
		must(t, err)
		defer storage.Close()
		if fileContains(t, storage, secret[:64]) {
			t.Error("the storage contains the written text")
		}
		if has, err := luks.HasHeader(storage); !has || err != nil {
			t.Errorf("the storage has no header: %v", err)
		}
	}
	l.withStorage(t, check)
	if kind.Has(Logical) || kind.Has(WholeDisk) {
		return
	}
	image, err := os.Open(l.image())
	must(t, err)
	defer image.Close()
	must(t, l.delete(t.Context()))
	header := make([]byte, luks.DataOffset)
	_, err = image.ReadAt(header, 0)
	must(t, err)
	if len(bytes.Trim(header, "\x00")) > 0 {
		t.Error("the deleted image still has a header or keyslots")
	}
}

// fileContains reports whether the data of a file contains a text.
func fileContains(t *testing.T, f *os.File, text []byte) bool {
	t.Helper()
	size, err := blockdev.Size(f)
	must(t, err)
	buf := make([]byte, 1<<20)
	for at := int64(0); at < size; {
		start, end, err := sys.NextData(f, at, size)
		must(t, err)
		for at = start; at < end; at += int64(len(buf) - len(text)) { // the blocks overlap
			n, err := f.ReadAt(buf[:min(int64(len(buf)), size-at)], at)
			must(t, err)
			if bytes.Contains(buf[:n], text) {
				return true
			}
		}
		at = max(end, start+1)
	}
	return false
}

// testContainerHeader: a volume with one damaged copy of its header can be used. If both are damaged, or the header is of
// another program, nothing is changed, and the header can be restored from a backup.
func testContainerHeader(t *testing.T, d *Driver, kind Kind) {
	ctx := t.Context()
	l := newVolume(t, d, kind, multiWriter)
	l.stageAndPublish(t)
	write(t, l.data(l.target), pattern(92))
	l.unpublishAndUnstage(t)
	backup := filepath.Join(t.TempDir(), "header")
	cryptsetup := func(args ...string) { // with the storage as the last argument
		t.Helper()
		l.withStorage(t, func(path string) { testenv.Run(t, "cryptsetup", append(args, path)...) })
	}
	cryptsetup("luksHeaderBackup", "--header-backup-file", backup)
	overwrite := func(offset int64, b []byte) {
		t.Helper()
		l.withStorage(t, func(path string) { writeAt(t, path, b, offset) })
	}
	for _, offset := range []int64{4096, 16<<10 + 4096} { // the driver restores the damaged copy
		overwrite(offset, make([]byte, 512))
		l.stageAndPublish(t)
		wantContent(t, l.data(l.target), pattern(92))
		l.unpublishAndUnstage(t)
	}
	overwrite(0, make([]byte, 32<<10))
	wantCode(t, l.stage(ctx), codes.DataLoss, "no valid LUKS2 header", "nothing was changed", "backup")
	overwrite(64<<10, []byte("SKUL\xba\xbe"))
	wantCode(t, l.stage(ctx), codes.DataLoss, "was not created with the settings of this driver")
	cryptsetup("--batch-mode", "luksHeaderRestore", "--header-backup-file", backup)
	l.stageAndPublish(t)
	wantContent(t, l.data(l.target), pattern(92))
	l.unpublishAndUnstage(t)
	cryptsetup("--batch-mode", "luksFormat", "--type", "luks2", "--pbkdf-memory", "131072", "--pbkdf-force-iterations", "4", "--pbkdf-parallel", "1",
		"--offset", "32768", "--sector-size", fmt.Sprint(4096), "--key-file", writtenKey(t))
	wantCode(t, l.stage(ctx), codes.DataLoss, "131072 KiB of memory")
}

// writtenKey returns the path of a file with the passphrase.
func writtenKey(t *testing.T) string {
	t.Helper()
	key := filepath.Join(t.TempDir(), "key")
	must(t, os.WriteFile(key, []byte(passphrase), 0o600))
	return key
}

// testContainerLeftOpen: a container that a killed driver has left open is used again, or closed.
func testContainerLeftOpen(t *testing.T, d *Driver, kind Kind) {
	ctx := t.Context()
	l := newVolume(t, d, kind, multiWriter)
	l.stageAndPublish(t)
	write(t, l.data(l.target), pattern(93))
	l.unpublishAndUnstage(t)
	leave := func() { // what a driver leaves that was killed after luks.Open
		t.Helper()
		device := l.attachLeft(t)
		testenv.Run(t, "env", "DM_DISABLE_UDEV=1", "cryptsetup", "open", "--key-file", writtenKey(t), device, l.mappedName())
		if !kind.Has(Logical) {
			testenv.Run(t, "losetup", "-d", device) // when the container is closed
		}
	}
	leave()
	must(t, l.unstage(ctx))
	if devices := devicesOf(t, l); len(devices) > 0 {
		t.Errorf("unstaging has left %q", devices)
	}
	leave()
	d.Restart(t)
	l.stageAndPublish(t)
	wantContent(t, l.data(l.target), pattern(93))
	testenv.Run(t, "cryptsetup", "status", l.mappedName())
}

// attachLeft attaches the storage of an unstaged volume, and returns its device.
func (l *testVolume) attachLeft(t *testing.T) string {
	t.Helper()
	switch {
	case l.kind.Has(WholeDisk):
		return l.attachPartition(t)
	case !l.kind.Has(Logical):
		return testenv.Run(t, "losetup", "--find", "--show", "--sector-size", fmt.Sprint(sectorOf(l.kind)), l.image())
	}
	name := l.d.volumeGroup() + "/" + l.logicalVolume(t)
	testenv.Run(t, "lvm", "lvchange", "-ay", "-K", name)
	return "/dev/" + name
}

// sectorOf returns the sector size of the devices of a kind.
func sectorOf(kind Kind) int {
	if kind.Block() {
		return 512
	}
	return 4096
}

// testEncryptedCopies: a copy of an encrypted volume has its passphrase. A class with another encryption is refused. Both
// volumes can be used at the same time.
func testEncryptedCopies(t *testing.T, d *Driver, kind Kind) {
	l := newVolume(t, d, kind, multiWriter)
	l.stageAndPublish(t)
	write(t, l.data(l.target), pattern(94))
	l.unpublishAndUnstage(t)
	refused := kind.copyRequest(t, fromVolume(l), 0)
	refused.Parameters[volume.ParamEncryption] = volume.EncryptionNone
	_, err := d.Control.CreateVolume(t.Context(), refused)
	wantCode(t, err, codes.InvalidArgument, "has encryption luks2", "use a class with encryption: luks2")
	request := kind.request(t)
	delete(request.Parameters, volume.ParamEncryption)
	request.CapacityRange = &csi.CapacityRange{RequiredBytes: gib}
	other, _ := newVolumeFor(t, d, kind, request)
	_, err = d.Control.CreateVolume(t.Context(), kind.copyRequest(t, fromVolume(other), 0))
	wantCode(t, err, codes.InvalidArgument, "has encryption none")
	size := 2 * gib
	if kind.Has(WholeDisk) { // all disks have the same size
		size = gib
	}
	c := d.newCopy(t, kind, fromVolume(l), size)
	l.stageAndPublish(t)
	c.stageAndPublish(t)
	wantContent(t, c.data(c.target), pattern(94))
	wantSize(t, c, size)
	write(t, c.data(c.target), pattern(95))
	wantContent(t, l.data(l.target), pattern(94))
	never := newVolume(t, d, kind, multiWriter) // the copy of a volume that was never staged gets its own container
	blank := d.newCopy(t, kind, fromVolume(never), 0)
	must(t, blank.stageWith(t.Context(), secretsOf("another")))
	blank.secrets = secretsOf("another")
	must(t, blank.publish(t.Context()))
}
