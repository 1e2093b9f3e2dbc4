package backend

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"regexp"

	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/linux/dm"
	"github.com/trivet-csi/trivet/linux/luks"
	"github.com/trivet-csi/trivet/linux/mount"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// Encryption is a parameter of the kinds whose volumes can be encrypted.
var Encryption = Parameter{
	Key: volume.ParamEncryption, Values: volume.EncryptionTypes(), Default: volume.EncryptionNone,
	Doc: "`luks2` [encrypts](../encryption.md) the volume with the passphrase of the class's node-stage secret.",
}

// ExamineEncryption reports for trivet doctor whether this node can attach encrypted volumes.
func ExamineEncryption() Finding {
	version, err := luks.Version(context.Background())
	if err != nil {
		return Finding{Name: "encryption", Found: fmt.Sprintf("only volumes with %s: %s need it, and it is not available: %v (install the package %s, or run the driver from its image; modprobe dm_crypt)", volume.ParamEncryption, volume.EncryptionLUKS2, err, luks.Package)}
	}
	return Finding{Name: "encryption", Found: luks.Program + " " + version}
}

// NewEncryption returns the encryption of a new volume, whose device has sectors of sectorSize bytes; nil if it is not
// encrypted.
func NewEncryption(p volume.Parameters, block bool, sectorSize int) *volume.Encryption {
	if p.Encryption() == volume.EncryptionNone {
		return nil
	}
	if !block { // every supported filesystem has blocks of at least 4096 bytes
		sectorSize = 4096
	}
	return &volume.Encryption{
		Type: volume.EncryptionLUKS2, Cipher: luks.Cipher, KeySize: luks.KeyBits, SectorSize: sectorSize, DataOffset: luks.DataOffset,
		Derivation: luks.Derivation, Memory: luks.DerivationMemory, Iterations: luks.DerivationTime,
	}
}

// HeaderSize returns the size in bytes of the header of a volume with parameters; 0 if it is not encrypted.
func HeaderSize(p volume.Parameters) int64 {
	if p.Encryption() == volume.EncryptionNone {
		return 0
	}
	return luks.DataOffset
}

// WithoutHeader returns a capacity without the header of an encrypted volume.
func WithoutHeader(c Capacity, p volume.Parameters) Capacity {
	header := HeaderSize(p)
	c.Available, c.Max = max(0, c.Available-header), max(0, c.Max-header)
	return c
}

// mappedPrefix is the prefix of the names of mapped devices, and mappedPattern matches the names.
const mappedPrefix = "trivet-"

var mappedPattern = regexp.MustCompile("^" + mappedPrefix + "[0-9a-f]{40}$")

// mappedName returns the name of the mapped device of an encrypted volume. It depends on the ID only, so that a volume can
// be unstaged without its record. It contains the node for a volume in a shared pool, because several nodes may run on one
// kernel.
func (d *Devices) mappedName(id volume.ID) string {
	if id.Shared() {
		return mappedNameOf(id.String() + "@" + d.Set.NodeID())
	}
	return MappedName(id)
}

// MappedName returns the name of the mapped device of an encrypted volume in a pool of a node.
func MappedName(id volume.ID) string { return mappedNameOf(id.String()) }

func mappedNameOf(text string) string {
	sum := sha256.Sum256([]byte(text))
	return mappedPrefix + hex.EncodeToString(sum[:20])
}

// IsMapped reports whether a name may be that of a mapped device.
func IsMapped(name string) bool { return mappedPattern.MatchString(name) }

// ContainerComplete reports whether the container of an encrypted volume is complete.
func (d *Devices) ContainerComplete(v volume.Volume) (bool, error) {
	p, err := d.Set.ByID(v.ID)
	if err != nil {
		return false, err
	}
	state, err := p.Images.ContainerState(v.ID.Name)
	return state == pool.Encrypted, err
}

// Mapped finds the mapped device of an encrypted volume on this node. If the record of the volume cannot be read, v has only
// the ID.
func (d *Devices) Mapped(v volume.Volume) (path string, ok bool, err error) {
	if !mayBeEncrypted(v) {
		return "", false, nil
	}
	name := d.mappedName(v.ID)
	ok, err = luks.Find(name)
	if errors.Is(err, dm.ErrNoDeviceMapper) && v.Encryption == nil {
		return "", false, nil
	}
	return luks.Path(name), ok, err
}

// MappedRaw returns the mapped device of a raw volume whose complete container is open.
func (d *Devices) MappedRaw(v volume.Volume) (path string, ok bool, err error) {
	path, ok, err = d.Mapped(v)
	if ok && v.Block && err == nil {
		ok, err = d.ContainerComplete(v)
		return path, ok, err
	}
	return path, false, err
}

// mayBeEncrypted reports whether a volume is encrypted, or its record cannot be read, so that v has only the ID.
func mayBeEncrypted(v volume.Volume) bool { return v.Encryption != nil || v.Version == 0 }

// CloseMapped closes the container of a volume, if it is open, and removes its device node.
func (d *Devices) CloseMapped(ctx context.Context, v volume.Volume) error {
	path, ok, err := d.Mapped(v)
	if err != nil || !mayBeEncrypted(v) {
		return err
	}
	if ok {
		mounts, err := mount.OfDevice(path)
		if err != nil {
			return err
		}
		if len(mounts) > 0 {
			return volume.Errorf(volume.ErrInUse, "volume %s is in use on this node: %s is mounted at %s: unpublish and unstage the volume there first", v.ID, path, mounts[0].Mountpoint)
		}
	}
	err = luks.Close(ctx, d.mappedName(v.ID))
	if errors.Is(err, dm.ErrNoDeviceMapper) && v.Encryption == nil {
		return nil
	}
	return explainContainer(v, err)
}

// CloseContainer closes the container of a volume on a device, and what a killed driver has left. The device need not exist.
func (d *Devices) CloseContainer(ctx context.Context, v volume.Volume, device string) error {
	if !mayBeEncrypted(v) {
		return nil
	}
	err := luks.CloseLeftovers(device)
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return errors.Join(err, d.CloseMapped(ctx, v))
}

// explainContainer adds the volume, and a sentinel error of package volume, to an error of package luks.
func explainContainer(v volume.Volume, err error) error {
	for known, sentinel := range map[error]error{
		luks.ErrBusy: volume.ErrInUse, luks.ErrNoHeader: volume.ErrDamaged, luks.ErrForeignHeader: volume.ErrDamaged, dm.ErrNoDeviceMapper: volume.ErrPrecondition, luks.ErrNoCrypt: volume.ErrPrecondition,
	} {
		if errors.Is(err, known) {
			return volume.Errorf(sentinel, "volume %s: %w", v.ID, err)
		}
	}
	return err
}

// Container is the storage of an encrypted volume, which is attached and locked.
type Container struct {
	Pool   *pool.Pool
	Volume volume.Volume
	// Device is the device with the container. Storage shows the same storage: the image below the device, or the device.
	Device, Storage *os.File
	// Spec describes the storage for the rule that only a blank device is formatted.
	Spec blockdev.FormatSpec
	// Used means that the storage has a mark that it may contain data, so the container is complete.
	Used bool
	// Foreign means that storage without a container may have signatures of other data, which are erased.
	Foreign bool
	Secrets volume.Secrets
}

// OpenContainer opens the container of a volume, and creates it if the storage never had one. If the volume has a
// filesystem, the kernel closes the container when the returned device is not open or mounted any more, for example because
// the driver was killed. The container of a raw volume stays open until CloseMapped.
func (d *Devices) OpenContainer(ctx context.Context, c *Container) (*os.File, error) {
	id := c.Volume.ID
	key, err := c.Secrets.Passphrase(id, volume.ParamNodeStageSecret)
	if err != nil {
		return nil, err
	}
	defer clear(key)
	if err := d.CloseContainer(ctx, c.Volume, c.Device.Name()); err != nil { // of a killed driver
		return nil, err
	}
	state, err := c.Pool.Images.ContainerState(id.Name)
	if err != nil {
		return nil, err
	}
	if state != pool.Encrypted && !c.Used {
		err = c.format(ctx, state, key)
	}
	if err == nil {
		err = c.checkHeader()
	}
	if err != nil {
		return nil, err
	}
	mapped, err := d.open(ctx, c, key)
	if err != nil || state == pool.Encrypted {
		return mapped, err
	}
	if err := c.complete(mapped, state); err != nil {
		return nil, errors.Join(err, mapped.Close(), d.CloseMapped(context.WithoutCancel(ctx), c.Volume))
	}
	return mapped, nil
}

// format creates the container on blank storage. If an earlier call was interrupted, it first erases the storage.
func (c *Container) format(ctx context.Context, state pool.FormatState, key []byte) error {
	journal := blockdev.FormatJournal{
		Interrupted: state == pool.Encrypting,
		Begin:       func() error { return c.Pool.Images.BeginEncryption(c.Volume.ID.Name) },
	}
	if journal.Interrupted {
		if err := luks.Erase(c.Storage); err != nil {
			return err
		}
	}
	if c.Foreign {
		if err := blockdev.EraseSignatures(c.Storage); err != nil {
			return err
		}
	}
	err := journal.Prepare(c.Storage, c.Spec)
	if errors.Is(err, blockdev.ErrNotBlank) {
		return volume.Errorf(volume.ErrDamaged, "volume %s was never encrypted, but %w: nothing was changed; if the data is not needed, delete the volume", c.Volume.ID, err)
	}
	if err != nil {
		return err
	}
	err = explainContainer(c.Volume, luks.Format(ctx, c.Device, c.Volume.Encryption.SectorSize, key))
	crashpoint.Here(crashpoint.StageEncrypted)
	return err
}

// complete prepares a new container for a filesystem, and records that it is complete. The data of a new container is
// random until it is written, and could look like a signature. The state of a container that was used is missing because
// the volume's folder was restored from a backup.
func (c *Container) complete(mapped *os.File, state pool.FormatState) error {
	if !c.Used {
		if err := blockdev.EraseSignatures(mapped); err != nil {
			return err
		}
		crashpoint.Here(crashpoint.StageErased)
	} else if state == pool.Unformatted {
		if err := c.Pool.Images.BeginEncryption(c.Volume.ID.Name); err != nil {
			return err
		}
	}
	return c.Pool.Images.MarkEncrypted(c.Volume.ID.Name)
}

// checkHeader verifies that the container has the settings of the record, and replaces a damaged copy of the header.
func (c *Container) checkHeader() error {
	h, err := luks.ReadHeader(c.Device)
	if err != nil {
		if errors.Is(err, luks.ErrNoHeader) {
			return volume.Errorf(volume.ErrDamaged, "volume %s: %w: nothing was changed; restore the header from a backup", c.Volume.ID, err)
		}
		return explainContainer(c.Volume, err)
	}
	e := c.Volume.Encryption
	if h.Cipher != e.Cipher || h.KeyBits != e.KeySize || h.SectorSize != e.SectorSize {
		return volume.Errorf(volume.ErrDamaged, "volume %s: its LUKS2 header has cipher %.30q, %d bits and sectors of %d bytes, the record has %s, %d and %d: nothing was changed; restore the header from a backup",
			c.Volume.ID, h.Cipher, h.KeyBits, h.SectorSize, e.Cipher, e.KeySize, e.SectorSize)
	}
	if h.Damaged {
		return luks.RestoreCopy(c.Device)
	}
	return nil
}

// open opens the container. If only the previous passphrase opens it, open replaces that by the new one.
func (d *Devices) open(ctx context.Context, c *Container, key []byte) (*os.File, error) {
	name := d.mappedName(c.Volume.ID)
	mapped, err := luks.Open(ctx, c.Device, name, key)
	if errors.Is(err, luks.ErrWrongKey) {
		previous := c.Secrets.PreviousPassphrase()
		defer clear(previous)
		if len(previous) > 0 {
			if err = luks.ChangeKey(ctx, c.Device, previous, key); err == nil {
				mapped, err = luks.Open(ctx, c.Device, name, key)
			}
		}
	}
	if errors.Is(err, luks.ErrWrongKey) {
		return nil, wrongPassphrase(c.Volume)
	}
	if err != nil {
		return nil, explainContainer(c.Volume, err)
	}
	crashpoint.Here(crashpoint.StageOpened)
	if c.Volume.Block {
		return mapped, nil
	}
	if err := luks.CloseLater(name); err != nil {
		return nil, errors.Join(err, mapped.Close())
	}
	return mapped, nil
}

// wrongPassphrase returns the error for a passphrase that does not open a volume.
func wrongPassphrase(v volume.Volume) error {
	return volume.Errorf(volume.ErrUnauthenticated, "secrets: the value of %q does not open volume %s: nothing was changed; give the Secret the volume's passphrase (to replace that, put it in %q)", volume.SecretPassphrase, v.ID, volume.SecretPrevious)
}

// Encrypted describes an encrypted volume that is attached.
type Encrypted struct {
	Mapped *os.File
	// FS is the filesystem in the container.
	FS *Filesystem
	// Commit makes the filesystem durable; see Filesystem.Complete.
	Commit func() error
}

// PrepareContainer opens the container of a volume, and creates or checks its filesystem.
func (d *Devices) PrepareContainer(ctx context.Context, c *Container) (*Encrypted, error) {
	mapped, err := d.OpenContainer(ctx, c)
	if err != nil {
		return nil, err
	}
	e := &Encrypted{Mapped: mapped}
	// The container does not read as zeros where nothing was written, so it is treated as a device with old data.
	e.FS, err = FilesystemOf(c.Pool, c.Volume, mapped.Name(), blockdev.FormatSpec{SectorSize: 4096, Stale: true})
	if err == nil {
		err = e.FS.Prepare(mapped)
	}
	if err == nil {
		e.Commit, err = e.FS.Complete(ctx, d.Formatter, mapped)
	}
	if err != nil {
		return nil, errors.Join(err, mapped.Close(), d.CloseMapped(context.WithoutCancel(ctx), c.Volume))
	}
	return e, nil
}

// GrowMapped makes the mapped device of a volume, if there is one, as large as its capacity. The device below it already
// has the new size.
func (d *Devices) GrowMapped(ctx context.Context, v volume.Volume, secrets volume.Secrets) error {
	path, ok, err := d.Mapped(v)
	if err != nil || !ok {
		return err
	}
	number, err := blockdev.NodeNumber(path)
	if err != nil || dm.Size(number) >= v.Capacity {
		return err
	}
	key, err := secrets.Passphrase(v.ID, volume.ParamExpandSecret)
	if err != nil {
		return err
	}
	defer clear(key)
	err = luks.Resize(ctx, d.mappedName(v.ID), key)
	if errors.Is(err, luks.ErrWrongKey) {
		return wrongPassphrase(v)
	}
	return explainContainer(v, err)
}
