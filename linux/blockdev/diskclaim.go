package blockdev

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/retry"
	"github.com/trivet-csi/trivet/linux/mount"
)

// Claim is a free disk that Mark can claim. It is open exclusively until Close.
type Claim struct {
	Disk Disk
	GUID GUID
	file *os.File
}

// Claim opens the disk exclusively and verifies that it is free. The error is ErrDiskBusy if the disk is claimed or
// in use, ErrNotBlank if it has data. Claim does not write to the disk.
func (d Disk) Claim(ctx context.Context) (*Claim, error) {
	f, err := d.OpenExclusive(ctx)
	if err != nil {
		return nil, err
	}
	if err := d.checkFree(f); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return &Claim{Disk: d, GUID: NewGUID(), file: f}, nil
}

// checkFree verifies that the disk, which is open exclusively, is still free.
func (d Disk) checkFree(f *os.File) error {
	size, err := Size(f)
	if err != nil {
		return err
	}
	_, marked := ReadMark(f, d.Size, d.SectorSize)
	use := d.inspectUsers()
	if size != d.Size || !errors.Is(marked, ErrNoMark) || use.Reason != "" {
		return fmt.Errorf("%s is no longer free (%s): %w", d.Path, cmp.Or(use.Detail, "its size or its mark has changed"), ErrDiskBusy)
	}
	return requireZerosIn(f, diskPlaces(d.Size, d.SectorSize))
}

// ErrDiskRefuses means that writing to the disk fails.
var ErrDiskRefuses = errors.New("disk cannot be written")

// Mark durably writes the mark, which claims the disk. name is the name in the mark. The error is ErrDiskRefuses if
// the mark cannot be written.
func (c *Claim) Mark(name string) error {
	m, err := WriteMark(c.file, Mark{GUID: c.GUID, Name: name}, c.Disk.Size, c.Disk.SectorSize)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrDiskRefuses, err)
	}
	_, err = c.Disk.showPartition(c.file, m)
	return err
}

// Close closes the disk, which ends the exclusive access.
func (c *Claim) Close() error { return c.file.Close() }

// Claimed identifies the disk of a claim.
type Claimed struct {
	// GUID is the GUID in the mark.
	GUID string
	// Identity is the identity that the disk had when it was claimed. It is empty if it is unknown.
	Identity string
}

// isNot reports whether a disk certainly is not the claimed one, because its identity differs.
func (c Claimed) isNot(d Disk) bool { return c.Identity != "" && d.Identity != c.Identity }

// ErrDiskUnreadable means that a disk cannot be read that may be the claimed one.
var ErrDiskUnreadable = errors.New("disk cannot be read")

// ErrDiskOther means that a disk has the mark of a claim, but the identity of another disk.
var ErrDiskOther = errors.New("not the disk that was claimed")

// FindClaim finds the disk of a claim among the disks of the globs. The caller may change the disk, so
// FindClaim returns an error if another disk may be the claimed one: ErrDiskGone if no disk has the mark,
// ErrNoMark if the claimed disk is present without the mark, ErrDiskBusy if two disks have the mark,
// ErrDiskOther if only a copy of the claimed disk has the mark, ErrDiskUnreadable if a disk that may have the
// mark cannot be read.
func FindClaim(globs []string, c Claimed) (Disk, Mark, error) {
	disks, err := FindDisks(globs)
	if err != nil {
		return Disk{}, Mark{}, err
	}
	marks := readMarks(disks)
	for _, m := range marks {
		if m.err != nil && !errors.Is(m.err, ErrNoMark) && !c.isNot(m.disk) {
			return m.disk, Mark{}, fmt.Errorf("%s, which may be the disk of %s: %w: %s", m.disk.Path, c.GUID, ErrDiskUnreadable, m.err.Error())
		}
	}
	d, m, err := findGUID(marks, c.GUID)
	if err == nil && c.isNot(d) {
		err = fmt.Errorf("%s has the mark of %s, but its identity is %q, not %q as when it was claimed: %w", d.Path, c.GUID, d.Identity, c.Identity, ErrDiskOther)
	}
	own := slices.IndexFunc(disks, func(d Disk) bool { return c.Identity != "" && !c.isNot(d) })
	if errors.Is(err, ErrDiskGone) && own >= 0 {
		return disks[own], m, fmt.Errorf("%s no longer has the mark of %s: %w", disks[own].Path, c.GUID, ErrNoMark)
	}
	return d, m, err
}

// SearchClaim finds the disk with the mark of a claim among the disks of the globs, and if none has it, among all
// disks. It skips disks that cannot be read. The error is ErrDiskGone if no disk has the mark, ErrDiskBusy if two
// disks have it.
func SearchClaim(globs []string, guid string) (Disk, Mark, error) {
	disks, err := FindDisks(globs)
	if err != nil {
		return Disk{}, Mark{}, err
	}
	d, m, err := findGUID(readMarks(disks), guid)
	if !errors.Is(err, ErrDiskGone) {
		return d, m, err
	}
	if disks, err = everyDisk(); err != nil {
		return Disk{}, Mark{}, err
	}
	return findGUID(readMarks(disks), guid)
}

// markResult is the mark of a disk, or the error of reading it.
type markResult struct {
	disk Disk
	mark Mark
	err  error
}

// readMarks reads the marks of all disks in parallel.
func readMarks(disks []Disk) []markResult {
	marks := make([]markResult, len(disks))
	var all sync.WaitGroup
	for i, d := range disks {
		all.Go(func() {
			m, err := d.Mark()
			marks[i] = markResult{d, m, err}
		})
	}
	all.Wait()
	return marks
}

// findGUID returns the only disk whose mark has the GUID. The error is ErrDiskGone if there is none, ErrDiskBusy if
// there are several.
func findGUID(marks []markResult, guid string) (Disk, Mark, error) {
	var found []markResult
	for _, m := range marks {
		if m.err == nil && m.mark.GUID.String() == guid {
			found = append(found, m)
		}
	}
	switch len(found) {
	case 0:
		return Disk{}, Mark{}, fmt.Errorf("no disk of this node has the mark of %s: %w", guid, ErrDiskGone)
	case 1:
		return found[0].disk, found[0].mark, nil
	}
	return found[0].disk, found[0].mark, fmt.Errorf("%s and %s both have the mark of %s, so one is a copy: %w",
		found[0].disk.Path, found[1].disk.Path, guid, ErrDiskBusy)
}

// Attach creates a device node with the name node for the partition of a claim (NodePath) and opens it. The
// error is ErrNoMark if the disk no longer has the mark of the claim.
func (d Disk) Attach(ctx context.Context, guid, node string) (*os.File, error) {
	disk, err := d.openLocked(ctx, os.O_RDWR)
	if err != nil {
		return nil, err
	}
	defer disk.Close()
	m, err := d.verify(disk, guid)
	if err != nil {
		return nil, err
	}
	p, err := d.showPartition(disk, m)
	if err != nil {
		return nil, err
	}
	if err := MakeNode(node, p.number); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(NodePath(node), os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	if !d.backs(f) {
		return nil, errors.Join(fmt.Errorf("%s: %w", d.Path, ErrDiskGone), f.Close())
	}
	return f, nil
}

// OpenData opens the partition of a claim without a permanent node. The error is ErrNoMark if the disk no longer has
// the mark of the claim.
func (d Disk) OpenData(ctx context.Context, guid string) (*os.File, error) {
	node := "opening." + NewGUID().String()
	f, err := d.Attach(ctx, guid, node)
	if err = errors.Join(err, RemoveNode(node)); err != nil {
		if f != nil {
			_ = f.Close()
		}
		return nil, err
	}
	return f, nil
}

// verify reads the mark. The error is ErrNoMark unless the mark is the complete mark of the claim.
func (d Disk) verify(disk *os.File, guid string) (Mark, error) {
	m, err := ReadMark(disk, d.Size, d.SectorSize)
	if err != nil {
		return m, fmt.Errorf("%s: %w", d.Path, err)
	}
	if m.GUID.String() != guid || !m.Complete {
		return m, fmt.Errorf("%s: it does not have the partition table of %s: %w", d.Path, guid, ErrNoMark)
	}
	return m, nil
}

// Hide makes the kernel forget the partition of a claim, which stays on the disk. The error is ErrDiskBusy if a
// program has the partition open for over a second.
func (d Disk) Hide(ctx context.Context) error {
	disk, err := d.openLocked(ctx, os.O_RDWR)
	if err != nil {
		return err
	}
	defer disk.Close()
	return retry.For(ctx, busyTimeout, func() (bool, error) {
		err := d.hidePartition(disk)
		return errors.Is(err, ErrDiskBusy), err
	})
}

// Detach undoes Attach, even if the disk was removed. It is no error if the claim is not attached. The error is
// ErrDiskBusy while a program has the partition open. guid is empty if it is unknown.
func Detach(ctx context.Context, guid, node string) error {
	present, d, err := present(guid, node)
	if err != nil {
		return err
	}
	if present && d != nil {
		if err := d.Hide(ctx); err != nil && !errors.Is(err, ErrDiskGone) {
			return err
		}
	}
	return RemoveNode(node)
}

// Present reports whether the partition of a claim is attached as a device node, and whether the disk was
// removed or cannot be read. It examines only the device of the node.
func Present(guid, node string) (ok, removed bool, err error) {
	ok, d, err := present(guid, node)
	return ok, ok && d == nil, err
}

// present does the same as Present, but returns the disk. d is nil if the disk was removed or cannot be read.
func present(guid, node string) (ok bool, d *Disk, err error) {
	number, err := NodeNumber(NodePath(node))
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil, nil
	}
	if err != nil {
		return false, nil, err
	}
	found, exists, err := diskOf(number)
	if err != nil || !exists {
		return err == nil, nil, err
	}
	m, err := found.Mark()
	switch {
	case err == nil && (guid == "" || m.GUID.String() == guid):
		return true, &found, nil
	case err != nil && !errors.Is(err, ErrNoMark): // an unreadable disk can be detached, too
		return true, nil, nil
	}
	// While a device is mounted, no other device gets its number. Otherwise the number may now
	// belong to another disk.
	mounts, err := mount.OfDevice(NodePath(node))
	return err == nil && len(mounts) > 0, nil, err
}

// diskOf returns the disk of the partition with a device number. ok is false if no device has the number.
func diskOf(number uint64) (d Disk, ok bool, err error) {
	dir, err := filepath.EvalSymlinks(fmt.Sprintf("/sys/dev/block/%d:%d", unix.Major(number), unix.Minor(number)))
	if errors.Is(err, fs.ErrNotExist) {
		return Disk{}, false, nil
	}
	if err != nil {
		return Disk{}, false, err
	}
	return readDisk(devicePath(filepath.Base(filepath.Dir(dir))))
}

// SetUsed durably records in the mark of the disk that the partition may contain data from now on. The disk
// may be in use.
func (d Disk) SetUsed(ctx context.Context, guid string) error {
	disk, err := d.openLocked(ctx, os.O_RDWR)
	if err != nil {
		return err
	}
	defer disk.Close()
	m, err := d.verify(disk, guid)
	if err != nil || m.Used {
		return err
	}
	return UseMark(disk, m, d.Size, d.SectorSize)
}

// KernelName returns the kernel name of the device of a device node, such as sda1.
func KernelName(node string) (string, error) {
	number, err := NodeNumber(node)
	if err != nil {
		return "", err
	}
	dir, err := os.Readlink(fmt.Sprintf("/sys/dev/block/%d:%d", unix.Major(number), unix.Minor(number)))
	return filepath.Base(dir), err
}

// Grow makes the partition of a claim as large as its disk, and returns its size in bytes.
// The partition may be in use.
func (d Disk) Grow(ctx context.Context, guid string) (int64, error) {
	disk, err := d.openLocked(ctx, os.O_RDWR)
	if err != nil {
		return 0, err
	}
	defer disk.Close()
	m, err := d.verify(disk, guid)
	if err != nil {
		return 0, err
	}
	if m.Size < d.Room() {
		if m, err = GrowMark(disk, m, d.Size, d.SectorSize); err != nil {
			return 0, err
		}
	}
	_, err = d.showPartition(disk, m)
	return m.Size, err
}

// IsClaimed reports whether the device at a path is a partition of a disk with a mark.
func IsClaimed(path string) bool {
	name, err := KernelName(path)
	if err != nil {
		return false
	}
	dir, err := filepath.EvalSymlinks("/sys/class/block/" + name)
	if err != nil {
		return false
	}
	if _, err := os.Stat(dir + "/partition"); err != nil {
		return false
	}
	d, ok, err := readDisk(devicePath(filepath.Base(filepath.Dir(dir))))
	if err != nil || !ok {
		return false
	}
	_, err = d.Mark()
	return err == nil
}
