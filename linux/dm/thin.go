package dm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/linux/sys"
)

// Usage is the size and the used part of an area, in bytes.
type Usage struct{ Used, Total int64 }

// Free returns the unused part in bytes.
func (u Usage) Free() int64 { return u.Total - u.Used }

// Percent returns the used part in percent.
func (u Usage) Percent() int64 {
	if u.Total == 0 {
		return 0
	}
	return u.Used * 100 / u.Total
}

// The modes of a thin pool (Documentation/admin-guide/device-mapper/thin-provisioning.rst in Linux).
const (
	ModeWritable   = "rw"
	ModeReadOnly   = "ro"
	ModeOutOfSpace = "out_of_data_space"
	ModeFailed     = "Fail" // also "Error": the metadata cannot be read
)

// ThinPool is the state of an active thin pool.
type ThinPool struct {
	Data, Metadata Usage
	Mode           string
	// Transaction is the ID that LVM changes each time it creates or removes volumes.
	Transaction int64
	// NeedsCheck means that the metadata must be repaired before it can be changed.
	NeedsCheck bool
	// ErrorIfFull means that writes to a full pool fail at once. Otherwise they wait until the pool is extended, or for
	// a time that a parameter of the kernel module sets.
	ErrorIfFull bool
	// Zero means that a block is zeroed before a volume sees it.
	Zero bool
}

// metadataBlock is the size of a block of the metadata of a thin pool, in bytes.
const metadataBlock = 4096

// thinPoolTarget is the type of the target of a thin pool. The module dm_thin_pool also contains that of thin volumes.
const thinPoolTarget = "thin-pool"

// poolSuffix ends the kernel's UUID of the device with the thin pool of a logical volume.
const poolSuffix = "-tpool"

// ThinPool returns the state of the thin pool that is the logical volume v. ok is false if it is not active.
func (v VolumeID) ThinPool() (p ThinPool, ok bool, err error) {
	t, ok, err := control(func(f *os.File) (sys.MappedTarget, error) { return sys.TargetOf(f, v.kernelUUID()+poolSuffix) })
	if err != nil || !ok {
		return p, ok, err
	}
	if p, err = parseThinPool(t); err != nil {
		err = fmt.Errorf("the status %+v of the thin pool %s: %w", t, v.Volume, err)
	}
	return p, err == nil, err
}

// parseThinPool parses the table and the status of a thin pool.
func parseThinPool(t sys.MappedTarget) (p ThinPool, err error) {
	if t.Type != thinPoolTarget {
		return p, errors.New("expected a " + thinPoolTarget)
	}
	var metadata, data string
	var blockSectors int64
	if _, err := fmt.Sscan(t.Parameters, &metadata, &data, &blockSectors); err != nil {
		return p, err
	}
	p.Zero = !strings.Contains(t.Parameters, " skip_block_zeroing")
	p.ErrorIfFull = strings.Contains(t.Parameters, " error_if_no_space")
	fields := strings.Fields(t.Status)
	if len(fields) < 5 { // "Fail" or "Error"
		p.Mode = ModeFailed
		return p, nil
	}
	if p.Transaction, err = strconv.ParseInt(fields[0], 10, 64); err != nil {
		return p, err
	}
	p.Mode = fields[4]
	p.NeedsCheck = strings.Contains(t.Status, " needs_check")
	if p.Metadata, err = parseUsage(fields[1], metadataBlock); err == nil {
		p.Data, err = parseUsage(fields[2], blockSectors*sector)
	}
	return p, err
}

// parseUsage parses "used/total", in units of a number of bytes.
func parseUsage(text string, unit int64) (Usage, error) {
	var used, total int64
	_, err := fmt.Sscanf(text, "%d/%d", &used, &total)
	return Usage{used * unit, total * unit}, err
}

// Mapped returns the size of the blocks of an active thin volume that were written, in bytes. ok is false if the volume
// is not active.
func (v VolumeID) Mapped() (n int64, ok bool, err error) {
	t, ok, err := control(func(f *os.File) (sys.MappedTarget, error) { return sys.TargetOf(f, v.kernelUUID()) })
	if err != nil || !ok {
		return 0, ok, err
	}
	count, _, _ := strings.Cut(t.Status, " ")
	sectors, err := strconv.ParseInt(count, 10, 64)
	if err != nil {
		err = fmt.Errorf("the status %+v of the thin volume %s: %w", t, v.Volume, err)
	}
	return sectors * sector, err == nil, err
}

// Suspend freezes the filesystem on the device of a logical volume, and lets its requests wait until Resume.
func (v VolumeID) Suspend() error { return v.onControl(sys.SuspendMapped) }

// Resume resumes the device of a logical volume, and thaws its filesystem.
func (v VolumeID) Resume() error { return v.onControl(sys.ResumeMapped) }

// DeviceName is the name of a device of the device mapper.
type DeviceName string

// Suspend freezes the filesystem on the device, and lets its requests wait until Resume.
func (n DeviceName) Suspend() error { return n.onControl(sys.SuspendMapped) }

// Resume resumes the device, and thaws its filesystem. The devices below it must be resumed before.
func (n DeviceName) Resume() error { return n.onControl(sys.ResumeMapped) }

// onControl calls f with the control node and the UUID of the device.
func (n DeviceName) onControl(f func(node *os.File, uuid string) error) error {
	d, ok, err := Named(string(n))
	if err == nil && ok {
		_, ok, err = control(func(node *os.File) (struct{}, error) { return struct{}{}, f(node, d.UUID) })
	}
	if err == nil && !ok {
		err = fmt.Errorf("the device %s does not exist: %w", n, ErrMissing)
	}
	return err
}

// onControl calls f with the control node and the kernel's UUID.
func (v VolumeID) onControl(f func(node *os.File, uuid string) error) error {
	_, ok, err := control(func(node *os.File) (struct{}, error) { return struct{}{}, f(node, v.kernelUUID()) })
	if err == nil && !ok {
		err = fmt.Errorf("the logical volume %s is not active: %w", v.Volume, ErrMissing)
	}
	return err
}

// A thin pool identifies its volumes by numbers, which LVM assigns in ascending order. firstTemporary is the first of the
// numbers at the end, which the functions below use for volumes that LVM does not know.
const firstTemporary = 1<<24 - MaxTemporary

// MaxTemporary is the number of temporary volumes that a thin pool can have.
const MaxTemporary = 100

// Numbers returns the numbers of the volumes in the thin pools of the group, by the UUID of the logical volume.
func (g Group) Numbers(ctx context.Context) (map[string]int, error) {
	out, err := g.run(ctx, "lvs", "-o", "lv_uuid,thin_id", "-S", "segtype=thin", g.Name)
	if err != nil {
		return nil, err
	}
	return parseNumbers(out)
}

// parseNumbers parses the output of the command lvs with the columns lv_uuid and thin_id.
func parseNumbers(out string) (map[string]int, error) {
	var all struct {
		Report []struct {
			LV []struct {
				UUID   string `json:"lv_uuid"`
				Number string `json:"thin_id"`
			} `json:"lv"`
			Seg []struct {
				UUID   string `json:"lv_uuid"`
				Number string `json:"thin_id"`
			} `json:"seg"`
		} `json:"report"`
	}
	if err := json.Unmarshal([]byte(out), &all); err != nil {
		return nil, fmt.Errorf("parsing the numbers of thin volumes: %w", err)
	}
	numbers := map[string]int{}
	for _, r := range all.Report {
		for _, lv := range append(r.LV, r.Seg...) {
			n, err := strconv.ParseUint(lv.Number, 10, 24)
			if err != nil {
				return nil, fmt.Errorf("parsing the number of the thin volume %s: %w", lv.UUID, err)
			}
			if n >= firstTemporary {
				return nil, fmt.Errorf("the thin volume %s has the number %d, which is used for temporary volumes: copy it to a new logical volume", lv.UUID, n)
			}
			numbers[lv.UUID] = int(n)
		}
	}
	return numbers, nil
}

// CopyTemporary copies the volume with a number, which is suspended or not active, to temporary volume i of the thin pool
// v. It starts no process.
func (v VolumeID) CopyTemporary(number, i int) error {
	if err := v.RemoveTemporary(i); err != nil { // of a driver that was killed
		return err
	}
	return v.send("create_snap %d %d", firstTemporary+i, number)
}

// ReplaceByTemporary replaces the content of the inactive volume with a number by that of temporary volume i, which is
// removed.
func (v VolumeID) ReplaceByTemporary(number, i int) error {
	if err := v.send("delete %d", number); err != nil {
		return err
	}
	if err := v.send("create_snap %d %d", number, firstTemporary+i); err != nil {
		return err
	}
	return v.RemoveTemporary(i)
}

// RemoveTemporary removes temporary volume i. It is no error if it does not exist.
func (v VolumeID) RemoveTemporary(i int) error {
	err := v.send("delete %d", firstTemporary+i)
	if errors.Is(err, unix.ENODATA) {
		return nil
	}
	return err
}

// send sends a message to the thin pool v.
func (v VolumeID) send(format string, args ...any) error {
	message := fmt.Sprintf(format, args...)
	_, ok, err := control(func(f *os.File) (struct{}, error) {
		return struct{}{}, sys.SendToTarget(f, v.kernelUUID()+poolSuffix, message)
	})
	if err == nil && !ok {
		err = ErrMissing
	}
	if err != nil {
		err = fmt.Errorf("message %q to the thin pool %s: %w", message, v.Volume, err)
	}
	return err
}

// newVolume returns the arguments of lvcreate(8) for a new volume in a thin pool. The volume is inactive, and programs that
// activate all volumes at boot do not activate it (LVM 2.03.16 refuses --setautoactivation for thin volumes). dmeventd(8)
// monitors the pool as before.
func (g Group) newVolume(name string, tags []string) []string {
	args := []string{"--yes", "--activate", "n", "--setactivationskip", "y", "--ignoremonitoring", "--name", name}
	for _, tag := range tags {
		args = append(args, "--addtag", tag)
	}
	return args
}

// CreateThin creates an inactive volume with a size in bytes in a thin pool. It reads as zeros.
func (g Group) CreateThin(ctx context.Context, pool, name string, size int64, tags []string) (VolumeID, error) {
	args := append(g.newVolume(name, tags), "--type", "thin", "--thinpool", pool, "--virtualsize", bytesOf(size), g.Name)
	if _, err := g.run(ctx, "lvcreate", args...); err != nil {
		return VolumeID{}, err
	}
	return g.created(ctx, name)
}

// CopyThin creates an inactive volume with the content of a thin volume, with which it shares its blocks. If the origin
// is active, its filesystem is frozen for a moment.
func (g Group) CopyThin(ctx context.Context, origin, name string, readOnly bool, tags []string) (VolumeID, error) {
	// lvcreate --snapshot needs the target of other snapshots, too.
	if err := loadTarget("snapshot", "dm_snapshot"); err != nil {
		return VolumeID{}, err
	}
	permission := "rw"
	if readOnly {
		permission = "r"
	}
	args := append(g.newVolume(name, tags), "--snapshot", "--permission", permission, g.Name+"/"+origin)
	if _, err := g.run(ctx, "lvcreate", args...); err != nil {
		return VolumeID{}, err
	}
	return g.created(ctx, name)
}

// PoolActive reports whether a thin pool is active itself. Otherwise it is active only while one of its volumes is.
func (g Group) PoolActive(name string) (bool, error) {
	_, ok, err := control(func(f *os.File) (sys.MappedDevice, error) { return sys.MappedDeviceByName(f, deviceName(g.Name, name)) })
	return ok, err
}

// loadTarget ensures that the kernel has a type of targets, or returns ErrNoModule. lvm(8) would execute modprobe(8), but the driver
// and its programs cannot load modules, and the image has no modprobe(8).
func loadTarget(target, module string) error {
	_, _, err := control(func(node *os.File) (struct{}, error) { return struct{}{}, sys.LoadTarget(node, target) })
	if errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("%w: thin volumes need %s: install it on the node: %w", ErrNoModule, module, err)
	}
	return err
}

// ActivatePool activates a thin pool. A killed command may have left only its parts active, which prevents that.
func (g Group) ActivatePool(ctx context.Context, name string) error {
	if err := loadTarget(thinPoolTarget, "dm_thin_pool"); err != nil {
		return err
	}
	at := g.Name + "/" + name
	activate := []string{"--yes", "--ignoremonitoring", "--activate", "y", "--ignoreactivationskip", at}
	_, err := g.run(ctx, "lvchange", activate...)
	if err == nil {
		return nil
	}
	if _, partsErr := g.run(ctx, "lvchange", "--yes", "--activate", "n", at+"_tmeta", at+"_tdata"); partsErr != nil {
		return err
	}
	_, err = g.run(ctx, "lvchange", activate...)
	return err
}
