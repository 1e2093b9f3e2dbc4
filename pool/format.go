package pool

import (
	"os"

	"github.com/trivet-csi/trivet/internal/atomicfile"
	"github.com/trivet-csi/trivet/pool/beneath"
)

// FormatState says how far the node got with a volume's filesystem. It is the
// name of an empty file in the volume's folder, so that each step is one entry
// made or renamed, and one fsync.
type FormatState string

const (
	// Unformatted means: nothing was ever written by the driver. The image must be
	// blank, else it is not ours to write to.
	Unformatted FormatState = ""
	// Formatting means: a filesystem was being made; whatever there is of it was
	// never handed out, and may be wiped.
	Formatting FormatState = "formatting"
	// Cloned means: the filesystem is a copy of another volume's and still has that
	// one's identity.
	Cloned FormatState = "cloned"
	// Formatted means: there may be data. Never to be formatted again.
	Formatted FormatState = "formatted"
)

// Images opens and locks the images of a pool's volumes, and records how far their
// filesystems are.
type Images struct{ *store }

// State reads how far the volume's filesystem is.
func (i *Images) State(name string) (FormatState, error) {
	for _, s := range []FormatState{Formatted, Cloned, Formatting} {
		_, err := i.root.Lstat(volumePath(name, string(s)))
		if err == nil {
			return s, nil
		}
		if !beneath.IsNotExist(err) {
			return Unformatted, err
		}
	}
	return Unformatted, nil
}

// BeginFormat records the intent to format, durably.
func (i *Images) BeginFormat(name string) error {
	f, err := i.files.Open(i.volumes, name+"/"+string(Formatting), os.O_WRONLY|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	return atomicfile.Sync(i.root, volumesDir+"/"+name)
}

// MarkCloned records in the folder of a volume that is being made that its image is a
// copy of one with a complete filesystem. It is durable when the volume is.
func MarkCloned(dir *os.Root) error {
	f, err := dir.OpenFile(string(Cloned), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	return f.Close()
}

// EndFormat records that the filesystem is complete, durably. The filesystem
// itself has to be durable before.
func (i *Images) EndFormat(name string) error { return i.formatted(name, Formatting) }

// EndClone records that a copied filesystem has an identity of its own, as EndFormat.
func (i *Images) EndClone(name string) error { return i.formatted(name, Cloned) }

func (i *Images) formatted(name string, from FormatState) error {
	if err := i.root.Rename(volumePath(name, string(from)), volumePath(name, string(Formatted))); err != nil {
		return err
	}
	return atomicfile.Sync(i.root, volumesDir+"/"+name)
}
