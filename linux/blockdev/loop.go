package blockdev

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/internal/retry"
	"github.com/trivet-csi/trivet/linux/sys"
)

const (
	loopControl = "/dev/loop-control"
	loopMajor   = 7
	// maxTag is the size of loop_info64.lo_file_name without the final NUL.
	maxTag = unix.LO_NAME_SIZE - 1
	// busyTimeout is the time to wait until other processes close a device.
	busyTimeout = time.Second
)

// LoopConfig is the configuration of a loop device.
type LoopConfig struct {
	// SectorSize is the logical block size in bytes, 512 or 4096.
	SectorSize int
	// Tag identifies the device. The kernel stores it with the device, up to 63 bytes. Unlike the
	// path in sysfs, the tag is the same in every mount namespace.
	Tag      string
	ReadOnly bool
	// AutoClear frees the device when its last descriptor is closed. The kernel closes the descriptors of a killed
	// process.
	AutoClear bool
	// KeepAllocated disables discards, so that the image stays allocated.
	KeepAllocated bool
}

// Loop is a bound loop device.
type Loop struct {
	Number int
	file   *os.File
}

// LoopPath returns the path of a loop device.
func LoopPath(number int) string { return "/dev/loop" + strconv.Itoa(number) }

// sysLoop returns the path of an attribute of a loop device in sysfs.
func sysLoop(number int, file string) string {
	return "/sys/block/loop" + strconv.Itoa(number) + "/" + file
}

// readLoop reads an attribute of a loop device in sysfs (kernel documentation, ABI/stable/sysfs-block).
func readLoop(number int, file string) (string, error) { return readText(sysLoop(number, file)) }

// AttachLoop binds an open image to a free loop device and returns the open device, which stays bound at
// least until Close. The device uses direct I/O if the image supports direct I/O in sectors of
// c.SectorSize (see directIOAlign). While the device is bound, the kernel keeps the open file of the
// image and any flock(2) on it. AttachLoop does not make the image durable.
func AttachLoop(ctx context.Context, image *os.File, c LoopConfig) (*Loop, error) {
	if len(c.Tag) > maxTag {
		return nil, fmt.Errorf("loop device: the tag has %d bytes, at most %d are possible", len(c.Tag), maxTag)
	}
	control, err := sys.OpenFile(loopControl, os.O_RDWR)
	if err != nil {
		return nil, fmt.Errorf("loop device: %w: load the loop module, and give the driver the host's /dev", err)
	}
	defer control.Close()
	var l *Loop
	err = retry.For(ctx, busyTimeout, func() (again bool, err error) {
		l, err = attachFree(control, image, c)
		return errors.Is(err, errTaken), err
	})
	return l, err
}

// errTaken means that another process has bound or removed the device.
var errTaken = errors.New("the free loop device was taken: is it open elsewhere (fuser)?")

// attachFree binds an image to a free device.
func attachFree(control, image *os.File, c LoopConfig) (*Loop, error) {
	number, err := reserved.reserve(control)
	if err != nil {
		return nil, err
	}
	defer reserved.release(number)
	if !c.KeepAllocated {
		removed, err := removeIfDiscardsForbidden(control, number)
		if removed {
			return nil, fmt.Errorf("%s: %w", LoopPath(number), errTaken)
		}
		if err != nil {
			return nil, err
		}
	}
	l, err := configureLoop(number, image, c)
	if errors.Is(err, unix.EBUSY) || errors.Is(err, unix.ENXIO) {
		return nil, fmt.Errorf("%w: %w", errTaken, err)
	}
	return l, err
}

// reservations holds the numbers of free devices that other calls in this process are binding. A reservation is
// necessary because LOOP_CTL_GET_FREE returns the same number to all callers until one of them has bound the device,
// and binding takes as long as the sync of the image.
type reservations struct {
	mu      sync.Mutex
	numbers map[int]bool
}

// reserved contains the reservations of this process.
var reserved = reservations{numbers: map[int]bool{}}

// reserve reserves a free device until release. If all free devices are reserved, it creates a device.
func (r *reservations) reserve(control *os.File) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	free, err := sys.FreeLoop(control)
	if err != nil {
		return 0, err
	}
	number := free
	for r.numbers[number] || number != free && Bound(number) {
		number++
	}
	if number != free {
		err = sys.AddLoop(control, number)
	}
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return 0, fmt.Errorf("adding %s: %w", LoopPath(number), err)
	}
	r.numbers[number] = true
	return number, nil
}

// release ends a reservation.
func (r *reservations) release(number int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.numbers, number)
}

// configureLoop binds an image to the free device with a number.
func configureLoop(number int, image *os.File, c LoopConfig) (*Loop, error) {
	// If the device is not open for writing, the kernel makes the binding read-only.
	l, err := openLoop(number, os.O_RDWR)
	if err != nil {
		return nil, err
	}
	config := unix.LoopConfig{Fd: uint32(image.Fd()), Size: uint32(c.SectorSize)}
	config.Info.Flags = unix.LO_FLAGS_DIRECT_IO
	if c.ReadOnly {
		config.Info.Flags |= unix.LO_FLAGS_READ_ONLY
	}
	if c.AutoClear {
		config.Info.Flags |= unix.LO_FLAGS_AUTOCLEAR
	}
	copy(config.Info.File_name[:maxTag], c.Tag)
	if err := sys.ConfigureLoop(l.file, &config); err != nil {
		_ = l.Close()
		return nil, err
	}
	if err := l.finishConfiguration(image, c); err != nil {
		return nil, errors.Join(err, l.clear(), l.Close())
	}
	return l, nil
}

// finishConfiguration verifies that the kernel has enabled direct I/O, because LOOP_CONFIGURE succeeds even if direct
// I/O is not possible. It disables discards if c requires that.
func (l *Loop) finishConfiguration(image *os.File, c LoopConfig) error {
	info, err := l.Status()
	if err != nil {
		return err
	}
	if !info.DirectIO && directIOAlign(image) <= uint32(c.SectorSize) {
		return fmt.Errorf("loop device %s: the image's filesystem does no direct I/O: put the pool on a filesystem that supports it (ext4, xfs, btrfs)",
			LoopPath(l.Number))
	}
	crashpoint.Here(crashpoint.StageBound)
	if c.KeepAllocated {
		return l.forbidDiscards()
	}
	return nil
}

// directIOAlign returns the alignment of direct I/O to a file in bytes (statx(2), STATX_DIOALIGN). The alignment is 0
// if the kernel does not report one or the file does not support direct I/O. On xfs the alignment grows permanently
// from a sector to a block when the file shares blocks (reflink). From then on, a loop device with smaller sectors
// uses buffered I/O.
func directIOAlign(f *os.File) uint32 {
	var st unix.Statx_t
	err := unix.Statx(int(f.Fd()), "", unix.AT_EMPTY_PATH, unix.STATX_DIOALIGN, &st)
	if err != nil || st.Mask&unix.STATX_DIOALIGN == 0 {
		return 0
	}
	return st.Dio_offset_align
}

// forbidDiscards disables the discards of a bound device. Discards cannot be enabled again, because disabling them
// also sets the discard granularity to 0, and the kernel accepts only multiples of the granularity as a new limit
// (tested with Linux 6.18). See removeIfDiscardsForbidden.
func (l *Loop) forbidDiscards() error {
	if err := os.WriteFile(sysLoop(l.Number, "queue/discard_max_bytes"), []byte("0"), 0); err != nil {
		return fmt.Errorf("loop device: %w: run the driver privileged, with a writable /sys", err)
	}
	return nil
}

// removeIfDiscardsForbidden removes a free device whose discards were disabled for an earlier image. The
// kernel creates a new device with this number on demand. A device that was never bound also has the limit 0.
// Such a device is kept. It is recognized by its hardware limit, which is 0 as well.
func removeIfDiscardsForbidden(control *os.File, number int) (removed bool, err error) {
	defer func() {
		// Another process has removed the device.
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) || errors.Is(err, unix.ENXIO) {
			removed, err = true, nil
		}
	}()
	limit, err := readLoop(number, "queue/discard_max_bytes")
	if err != nil || limit != "0" {
		return false, err
	}
	hardware, err := readLoop(number, "queue/discard_max_hw_bytes")
	if err != nil || hardware == "0" {
		return false, err
	}
	err = sys.RemoveLoop(control, number)
	if errors.Is(err, unix.EBUSY) { // another process has the device open: use the device without discards
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("removing %s: %w", LoopPath(number), err)
	}
	return true, nil
}

// OpenLoop opens a loop device for reading, bound or not. It creates a missing device node,
// because the kernel does not update /dev of a container.
func OpenLoop(number int) (*Loop, error) { return openLoop(number, os.O_RDONLY) }

// openLoop does the same as OpenLoop with the flag of open(2).
func openLoop(number, flag int) (*Loop, error) {
	path := LoopPath(number)
	f, err := sys.OpenFile(path, flag)
	if errors.Is(err, fs.ErrNotExist) {
		if err = makeNode(path, number); err == nil {
			f, err = sys.OpenFile(path, flag)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("loop device: %w", err)
	}
	return &Loop{Number: number, file: f}, nil
}

// makeNode creates the device node of a loop device.
func makeNode(path string, number int) error {
	err := unix.Mknod(path, unix.S_IFBLK|0o600, int(unix.Mkdev(loopMajor, uint32(number))))
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("%s is missing and cannot be created: %w", path, err)
	}
	return nil
}

// File returns the open device.
func (l *Loop) File() *os.File { return l.file }

// Close closes the device. With AutoClear the last close frees it.
func (l *Loop) Close() error { return l.file.Close() }

// LoopStatus is the state of a bound device.
type LoopStatus struct {
	Tag       string
	DirectIO  bool
	ReadOnly  bool
	AutoClear bool
}

// Status reads the state of the device. The error is unix.ENXIO if the device is not bound.
func (l *Loop) Status() (LoopStatus, error) {
	info, err := sys.LoopStatus(l.file)
	if err != nil {
		return LoopStatus{}, err
	}
	return LoopStatus{
		Tag:       unix.ByteSliceToString(info.File_name[:]),
		DirectIO:  info.Flags&unix.LO_FLAGS_DIRECT_IO != 0,
		ReadOnly:  info.Flags&unix.LO_FLAGS_READ_ONLY != 0,
		AutoClear: info.Flags&unix.LO_FLAGS_AUTOCLEAR != 0,
	}, nil
}

// GrowLoop sets the size of a device to the size of its image, if the device has less than size bytes.
func GrowLoop(number int, size int64) error {
	l, err := OpenLoop(number)
	if err != nil {
		return err
	}
	defer l.Close()
	current, err := Size(l.file)
	if err != nil || current >= size {
		return err
	}
	if err := sys.ResizeLoop(l.file); err != nil {
		return err
	}
	crashpoint.Here(crashpoint.GrowDevice)
	return nil
}

// clear unbinds the device (sys.ClearLoop). It is no error if the device is not bound.
func (l *Loop) clear() error {
	err := sys.ClearLoop(l.file)
	if errors.Is(err, unix.ENXIO) {
		return nil
	}
	return err
}

// disableAutoClear unsets the flag AUTOCLEAR. LOOP_CLR_FD sets this flag if other processes have the
// device open.
func (l *Loop) disableAutoClear() error {
	info, err := sys.LoopStatus(l.file)
	if err != nil {
		return err
	}
	info.Flags &^= unix.LO_FLAGS_AUTOCLEAR
	return sys.SetLoopStatus(l.file, info)
}

// ErrDeviceBusy means that the device is still bound, because a process has it open.
var ErrDeviceBusy = errors.New("device is still in use")

// busy returns the error for a device that is still bound.
func busy(number int) error {
	device := LoopPath(number)
	return fmt.Errorf("%s: %w: a process has it open, or has it mounted in its own mount namespace (grep %[1]s /proc/*/mountinfo)",
		device, ErrDeviceBusy)
}

// DetachLoop frees the device if it has the tag, and returns when it is free. If other processes have the device
// open for over a second, DetachLoop does not change it and returns ErrDeviceBusy. A device with another tag is not
// changed.
func DetachLoop(ctx context.Context, number int, tag string) error {
	return retry.For(ctx, busyTimeout, func() (bool, error) {
		freed, err := tryDetach(number, tag)
		if !freed && err == nil {
			err = busy(number)
		}
		return errors.Is(err, ErrDeviceBusy), err
	})
}

// tryDetach reads the tag and clears the device through the same descriptor. While the descriptor
// is open, the device cannot be bound to another image.
func tryDetach(number int, tag string) (freed bool, err error) {
	l, err := OpenLoop(number)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENXIO) {
		return !Bound(number), nil
	}
	if err != nil {
		return false, err
	}
	tagged, err := l.clearTagged(tag)
	if err = errors.Join(err, l.Close()); err != nil || !tagged {
		return err == nil, err
	}
	return !Bound(number), nil
}

// clearTagged clears the device if it has the tag, and reports whether the device has the tag. The kernel frees the
// device now or when l is closed. If other processes have the device open, the kernel only sets AUTOCLEAR, and
// clearTagged restores the flag.
func (l *Loop) clearTagged(tag string) (tagged bool, err error) {
	before, err := l.Status()
	switch {
	case errors.Is(err, unix.ENXIO): // it is being freed
		return true, nil
	case err == nil && before.Tag != tag:
		return false, nil
	case err == nil:
		err = l.clear()
	}
	if err != nil {
		return true, err
	}
	_, err = l.Status()
	if errors.Is(err, unix.ENXIO) {
		return true, nil
	}
	if err == nil && !before.AutoClear {
		err = l.disableAutoClear()
	}
	return true, err
}

// RecoverLoop completes an interrupted AttachLoop for a device without AutoClear: the device stays bound
// when it is closed, and discards are disabled if keepAllocated is set. ok reports whether the device
// has the tag.
func RecoverLoop(number int, tag string, keepAllocated bool) (ok bool, err error) {
	var status LoopStatus
	l, err := OpenLoop(number)
	if err == nil {
		defer l.Close()
		status, err = l.Status()
	}
	if errors.Is(err, unix.ENXIO) || err == nil && status.Tag != tag { // ENXIO: it is not bound, or being freed
		return false, nil
	}
	if err == nil && status.AutoClear {
		err = l.disableAutoClear()
	}
	if err == nil && keepAllocated {
		err = l.forbidDiscards()
	}
	return err == nil, err
}

// DiskSeq returns the sequence number of the device, which changes with each image. It is empty if the
// kernel has no sequence numbers.
func DiskSeq(number int) string {
	seq, _ := readLoop(number, "diskseq")
	return seq
}

// Bound reports whether the device is bound to an image.
func Bound(number int) bool {
	_, err := os.Stat(sysLoop(number, "loop/backing_file"))
	return err == nil
}

// AwaitFree returns when the device is not bound, or its sequence number (DiskSeq) is no longer seq.
// The error is ErrDeviceBusy if neither is the case within a second.
func AwaitFree(ctx context.Context, number int, seq string) error {
	return retry.For(ctx, busyTimeout, func() (bool, error) {
		if !Bound(number) || DiskSeq(number) != seq {
			return false, nil
		}
		return true, busy(number)
	})
}

// BoundLoop is a loop device that is bound to an image.
type BoundLoop struct {
	Number int
	// Deleted means that the image was removed.
	Deleted bool
}

// BoundLoops lists the bound loop devices for whose backing file accept returns true.
func BoundLoops(accept func(backingFile string) bool) ([]BoundLoop, error) {
	entries, err := os.ReadDir("/sys/block")
	if err != nil {
		return nil, err
	}
	var bound []BoundLoop
	for _, e := range entries {
		digits, isLoop := strings.CutPrefix(e.Name(), "loop")
		number, err := strconv.Atoi(digits)
		if !isLoop || err != nil {
			continue
		}
		file, err := readLoop(number, "loop/backing_file")
		if err != nil {
			continue
		}
		file, deleted := strings.CutSuffix(file, " (deleted)")
		if accept(file) {
			bound = append(bound, BoundLoop{number, deleted})
		}
	}
	return bound, nil
}

// LoopTag returns the tag of a device. It is empty if the device is not bound.
func LoopTag(number int) (string, error) {
	var status LoopStatus
	l, err := OpenLoop(number)
	if err == nil {
		defer l.Close()
		status, err = l.Status()
	}
	if errors.Is(err, unix.ENXIO) { // it is not bound, or being freed
		return "", nil
	}
	return status.Tag, err
}

// Probe reads the beginning of the image of a loop device with direct I/O. The errors are those of
// read(2), such as EIO.
func Probe(number int) error {
	l, err := openLoop(number, os.O_RDONLY|unix.O_DIRECT)
	if err != nil {
		return err
	}
	defer l.Close()
	return ProbeFile(l.file)
}

// ProbeFile reads the beginning of a device or a file that is open with O_DIRECT.
func ProbeFile(f *os.File) error {
	// O_DIRECT requires aligned memory (open(2)), such as a page.
	page, err := unix.Mmap(-1, 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return fmt.Errorf("probing %s: mmap: %w", f.Name(), err)
	}
	defer func() { _ = unix.Munmap(page) }()
	if _, err := f.ReadAt(page, 0); err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	return nil
}

// Size returns the size of a block device or an image in bytes.
func Size(f *os.File) (int64, error) { return f.Seek(0, io.SeekEnd) }
