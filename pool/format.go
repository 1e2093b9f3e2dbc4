package pool

import (
	"os"

	"github.com/trivet-csi/trivet/internal/atomicfile"
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

// FormatState reads how far the volume's filesystem is.
func (p *Pool) FormatState(name string) (FormatState, error) {
	for _, s := range []FormatState{Formatted, Cloned, Formatting} {
		_, err := p.root.Lstat(volumePath(name, string(s)))
		if err == nil {
			return s, nil
		}
		if !isNotExist(err) {
			return Unformatted, err
		}
	}
	return Unformatted, nil
}

// BeginFormat records the intent to format, durably.
func (p *Pool) BeginFormat(name string) error {
	f, err := p.openRegular(p.volumes, name+"/"+string(Formatting), os.O_WRONLY|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	return atomicfile.Sync(p.root, volumesDir+"/"+name)
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
func (p *Pool) EndFormat(name string) error { return p.formatted(name, Formatting) }

// EndClone records that a copied filesystem has an identity of its own, as EndFormat.
func (p *Pool) EndClone(name string) error { return p.formatted(name, Cloned) }

func (p *Pool) formatted(name string, from FormatState) error {
	if err := p.root.Rename(volumePath(name, string(from)), volumePath(name, string(Formatted))); err != nil {
		return err
	}
	return atomicfile.Sync(p.root, volumesDir+"/"+name)
}
