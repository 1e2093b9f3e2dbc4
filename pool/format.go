package pool

import (
	"os"

	"github.com/trivet-csi/trivet/internal/atomicfile"
	"github.com/trivet-csi/trivet/linux/sys"
	"github.com/trivet-csi/trivet/pool/beneath"
)

// FormatState is the state of a volume's filesystem, or of its encryption. It is the name of an empty file in the
// volume's folder, so that each step is one file created or renamed, and one fsync.
type FormatState string

const (
	// Unformatted means that the driver has not written to the image since the volume was created. It formats only a blank image.
	Unformatted FormatState = ""
	// Formatting means that the driver has begun to make a filesystem. The volume was never staged, so
	// the image may be wiped.
	Formatting FormatState = "formatting"
	// Cloned means that the filesystem is a copy of another volume's, and still has its UUID.
	Cloned FormatState = "cloned"
	// Formatted means that the filesystem is complete and may have data. It is never formatted again.
	Formatted FormatState = "formatted"
)

// The states of the container of an encrypted volume, beside the state of the filesystem in it.
const (
	// Encrypting means that the driver has begun to make the container, which has no data yet.
	Encrypting FormatState = "encrypting"
	// Encrypted means that the container is complete and may have data. It is never made again.
	Encrypted FormatState = "encrypted"
)

// Images opens and locks the images of a pool's volumes, and records the states of their
// filesystems.
type Images struct{ *store }

// State reads the state of a volume's filesystem.
func (i *Images) State(name string) (FormatState, error) {
	return i.state(name, Formatted, Cloned, Formatting)
}

// ContainerState reads the state of the container of an encrypted volume; Unformatted if there is none.
func (i *Images) ContainerState(name string) (FormatState, error) {
	return i.state(name, Encrypted, Encrypting)
}

// state returns the first of the states that is recorded.
func (i *Images) state(name string, states ...FormatState) (FormatState, error) {
	for _, s := range states {
		_, err := beneath.Stat(i.volumes, name+"/"+string(s))
		if err == nil {
			return s, nil
		}
		if !beneath.IsNotExist(err) {
			return Unformatted, err
		}
	}
	return Unformatted, nil
}

// BeginFormat records the state Formatting durably.
func (i *Images) BeginFormat(name string) error { return i.begin(name, Formatting) }

// BeginEncryption records the state Encrypting durably.
func (i *Images) BeginEncryption(name string) error { return i.begin(name, Encrypting) }

// begin records a state durably.
func (i *Images) begin(name string, state FormatState) error {
	f, err := i.files.Open(i.volumes, name+"/"+string(state), os.O_WRONLY|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	return atomicfile.Sync(i.root, volumesDir+"/"+name)
}

// MarkCloned records the state Cloned in the folder of a volume in tmp. It is durable when the
// volume is.
func MarkCloned(dir *os.Root) error { return markNew(dir, Cloned) }

// MarkContainerCopied does the same as MarkCloned for the state Encrypted.
func MarkContainerCopied(dir *os.Root) error { return markNew(dir, Encrypted) }

// MarkCreated does the same as MarkCloned for the state Formatted. The image is durable when the volume is.
func MarkCreated(dir *os.Root) error { return markNew(dir, Formatted) }

// markNew records a state in the folder of a volume in tmp.
func markNew(dir *os.Root, state FormatState) error {
	flags, err := sys.NoDelegationIn(dir)
	if err != nil {
		return err
	}
	f, err := dir.OpenFile(string(state), os.O_WRONLY|os.O_CREATE|os.O_EXCL|sys.NonBlocking|flags, 0o600)
	if err != nil {
		return err
	}
	return f.Close()
}

// MarkFormatted replaces the state from, which is Formatting or Cloned, by Formatted, durably. The
// filesystem must be durable before, and a cloned one must have its own UUID.
func (i *Images) MarkFormatted(name string, from FormatState) error {
	return i.replaceState(name, from, Formatted)
}

// MarkEncrypted replaces the state Encrypting by Encrypted, durably. The container must be durable before.
func (i *Images) MarkEncrypted(name string) error {
	return i.replaceState(name, Encrypting, Encrypted)
}

// replaceState replaces a state by the next one.
func (i *Images) replaceState(name string, from, to FormatState) error {
	if err := i.root.Rename(volumePath(name, string(from)), volumePath(name, string(to))); err != nil {
		return err
	}
	return atomicfile.Sync(i.root, volumesDir+"/"+name)
}
