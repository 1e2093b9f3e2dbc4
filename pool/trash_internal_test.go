package pool

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/linux/luks"
	"github.com/trivet-csi/trivet/volume"
)

// TestHeaderErasedInTrash: the header of an encrypted volume is erased before its image is removed, if the driver was killed
// right after it had moved the volume to the trash. An image that another folder contains as well is left alone.
func TestHeaderErasedInTrash(t *testing.T) {
	p, at := openPlain(t)
	record, err := volume.Volume{
		Version: 1, ID: p.ID("loop", "v"), Capacity: 1 << 30, FSType: "ext4", SectorSize: 4096, Created: time.Now(),
		Encryption: &volume.Encryption{Type: volume.EncryptionLUKS2, Cipher: luks.Cipher, KeySize: luks.KeyBits, SectorSize: 4096, DataOffset: luks.DataOffset, Derivation: luks.Derivation, Memory: luks.DerivationMemory, Iterations: luks.DerivationTime},
	}.MarshalRecord()
	must(t, err)
	stopTasks(p)
	entry := func(name string) *os.File {
		folder := filepath.Join(at, trashDir, name)
		must(t, os.Mkdir(folder, 0o700))
		must(t, os.WriteFile(filepath.Join(folder, recordFile), record, 0o600))
		must(t, os.WriteFile(filepath.Join(folder, ImageFile), bytes.Repeat([]byte("x"), luks.DataOffset+4096), 0o600))
		image, err := os.Open(filepath.Join(folder, ImageFile))
		must(t, err)
		t.Cleanup(func() { image.Close() })
		return image
	}
	deleted, linked := entry("deleted.1"), entry("linked.1")
	must(t, os.Link(linked.Name(), filepath.Join(t.TempDir(), ImageFile)))
	for _, name := range []string{"deleted.1", "linked.1"} {
		must(t, p.Trash.reapEntry(t.Context(), &trashEntry{name: name}))
	}
	header := make([]byte, luks.DataOffset+1)
	if _, err := deleted.ReadAt(header, 0); err != nil || len(bytes.Trim(header, "\x00")) != 1 {
		t.Errorf("%d bytes of the header are left, want 0 and one byte of data (%v)", len(bytes.Trim(header, "\x00"))-1, err)
	}
	if _, err := linked.ReadAt(header, 0); err != nil || bytes.Contains(header, []byte{0}) {
		t.Errorf("the image with two links was changed (%v)", err)
	}
}
