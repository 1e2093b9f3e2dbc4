package blockdev

import (
	"context"
	"errors"
	"fmt"
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
	// maxTag is the room for a tag in loop_info64.lo_file_name, with its NUL.
	maxTag = unix.LO_NAME_SIZE - 1
	// busyTimeout is how long to wait for a device that others are about to close.
	busyTimeout = time.Second
)

// LoopConfig is the configuration of a loop device.
type LoopConfig struct {
	// SectorSize is the logical block size in bytes, 512 or 4096.
	SectorSize int
	// Tag identifies the device, in up to 63 bytes that the kernel keeps with it. It is the
	// same in every mount namespace; the path in sysfs is not.
	Tag      string
	ReadOnly bool
	// AutoClear frees the device at its last close, so that a killed process leaves none
	// behind.
	AutoClear bool
	// KeepAllocated makes the device refuse discards, so that the image stays allocated.
	KeepAllocated bool
}

// Loop is a bound loop device.
type Loop struct {
	Number int
	file   *os.File
}

// LoopPath is the path of a loop device.
func LoopPath(number int) string { return "/dev/loop" + strconv.Itoa(number) }

func sysLoop(number int, file string) string {
	return "/sys/block/loop" + strconv.Itoa(number) + "/" + file
}

// AttachLoop binds an open image to a free loop device and returns the device open: it
// stays bound at least until Close. It uses direct I/O if the image supports that in
// sectors of this size (see directIOAlign). The kernel keeps the image's open file, and with
// it any flock(2) on it, while the device is bound.
func AttachLoop(ctx context.Context, image *os.File, c LoopConfig) (*Loop, error) {
	if len(c.Tag) > maxTag {
		return nil, fmt.Errorf("loop device: tag of %d bytes, at most %d fit", len(c.Tag), maxTag)
	}
	control, err := os.OpenFile(loopControl, os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("loop device: %w: load the loop module, and give the driver the host's /dev", err)
	}
	defer control.Close()
	// LOOP_CONFIGURE syncs the image as well, but until that is done LOOP_CTL_GET_FREE returns
	// the same device to other processes.
	if err := image.Sync(); err != nil {
		return nil, fmt.Errorf("loop device: %w", err)
	}
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
		removed, err := removeWithoutDiscards(control, number)
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

// reservations are the numbers of free devices that calls of this process are binding.
// LOOP_CTL_GET_FREE returns the same number to all callers until one of them has bound it,
// which takes as long as the image's disk takes to sync.
type reservations struct {
	mu      sync.Mutex
	numbers map[int]bool
}

var reserved = reservations{numbers: map[int]bool{}}

// reserve reserves a free device until release. It adds a device if all free ones are
// reserved.
func (r *reservations) reserve(control *os.File) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	number, err := sys.FreeLoop(control)
	if err != nil {
		return 0, err
	}
	for r.numbers[number] || Bound(number) {
		number++
	}
	err = sys.AddLoop(control, number)
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return 0, fmt.Errorf("adding %s: %w", LoopPath(number), err)
	}
	r.numbers[number] = true
	return number, nil
}

func (r *reservations) release(number int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.numbers, number)
}

func configureLoop(number int, image *os.File, c LoopConfig) (*Loop, error) {
	// A device that is not open for writing is bound read-only.
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
	if err := l.verify(image, c); err != nil {
		return nil, errors.Join(err, l.clear(), l.Close())
	}
	return l, nil
}

// verify verifies what the kernel may ignore silently, and sets what LOOP_CONFIGURE cannot.
func (l *Loop) verify(image *os.File, c LoopConfig) error {
	info, err := l.Status()
	if err != nil {
		return err
	}
	if !info.DirectIO && directIOAlign(image) <= uint32(c.SectorSize) {
		return fmt.Errorf("loop device %s: the image's filesystem does no direct I/O: put the pool on one that does (ext4, xfs, btrfs)", LoopPath(l.Number))
	}
	crashpoint.Here(crashpoint.StageBound)
	if c.KeepAllocated {
		return l.forbidDiscards()
	}
	return nil
}

// directIOAlign is the alignment of direct I/O to a file in bytes (statx(2), STATX_DIOALIGN);
// 0 if the kernel does not report it, or the file does not support it. On xfs it grows from a
// sector to a block when blocks of the file become shared, and stays so afterwards: a
// device with smaller sectors is buffered from then on.
func directIOAlign(f *os.File) uint32 {
	var st unix.Statx_t
	err := unix.Statx(int(f.Fd()), "", unix.AT_EMPTY_PATH, unix.STATX_DIOALIGN, &st)
	if err != nil || st.Mask&unix.STATX_DIOALIGN == 0 {
		return 0
	}
	return st.Dio_offset_align
}

// forbidDiscards makes a bound device refuse discards. This cannot be undone: without
// discards the kernel has a granularity of 0, and accepts only a limit that is a multiple
// of it (tried on Linux 6.18). See removeWithoutDiscards.
func (l *Loop) forbidDiscards() error {
	if err := os.WriteFile(sysLoop(l.Number, "queue/discard_max_bytes"), []byte("0"), 0); err != nil {
		return fmt.Errorf("loop device: %w: run the driver privileged, with a writable /sys", err)
	}
	return nil
}

// removeWithoutDiscards removes a free device that refuses discards because of an earlier image; the
// kernel creates a new one of that number on demand. A device that was never bound has no
// hardware limit either.
func removeWithoutDiscards(control *os.File, number int) (removed bool, err error) {
	defer func() {
		// Another process has removed it.
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) || errors.Is(err, unix.ENXIO) {
			removed, err = true, nil
		}
	}()
	limit, err := readQueue(number, "discard_max_bytes")
	if err != nil || limit != "0" {
		return false, err
	}
	hardware, err := readQueue(number, "discard_max_hw_bytes")
	if err != nil || hardware == "0" {
		return false, err
	}
	err = sys.RemoveLoop(control, number)
	if errors.Is(err, unix.EBUSY) { // another process has it open; it is used without discards
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("removing %s: %w", LoopPath(number), err)
	}
	return true, nil
}

// readQueue reads a limit of the request queue of a device (kernel documentation,
// ABI/stable/sysfs-block).
func readQueue(number int, limit string) (string, error) {
	b, err := os.ReadFile(sysLoop(number, "queue/"+limit))
	return strings.TrimSpace(string(b)), err
}

// OpenLoop opens a loop device, bound or not, for reading. It creates a missing device
// node: in a container /dev is not updated by the kernel.
func OpenLoop(number int) (*Loop, error) { return openLoop(number, os.O_RDONLY) }

func openLoop(number, flag int) (*Loop, error) {
	fd, err := openNode(number, flag)
	if err != nil {
		return nil, err
	}
	return &Loop{Number: number, file: os.NewFile(uintptr(fd), LoopPath(number))}, nil
}

func openNode(number, flag int) (fd int, err error) {
	path := LoopPath(number)
	fd, err = open(path, flag)
	if errors.Is(err, fs.ErrNotExist) {
		if err = makeNode(path, number); err == nil {
			fd, err = open(path, flag)
		}
	}
	if err != nil {
		return -1, fmt.Errorf("loop device: %w", &fs.PathError{Op: "open", Path: path, Err: err})
	}
	return fd, nil
}

// open is open(2), restarted when a signal interrupts it.
func open(path string, flag int) (int, error) {
	for {
		fd, err := unix.Open(path, flag|unix.O_CLOEXEC, 0)
		if !errors.Is(err, unix.EINTR) {
			return fd, err
		}
	}
}

func makeNode(path string, number int) error {
	err := unix.Mknod(path, unix.S_IFBLK|0o600, int(unix.Mkdev(loopMajor, uint32(number))))
	if err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("%s is missing and cannot be made: %w", path, err)
	}
	return nil
}

// File is the open device.
func (l *Loop) File() *os.File { return l.file }

// Close closes the device. With AutoClear, and if nothing else has it open, that frees it.
func (l *Loop) Close() error { return l.file.Close() }

// LoopStatus is the state of a bound device.
type LoopStatus struct {
	Tag       string
	DirectIO  bool
	ReadOnly  bool
	AutoClear bool
}

// Status reads the device's state; unix.ENXIO if it is not bound.
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

// UpdateSize makes the device as large as its image has become (LOOP_SET_CAPACITY).
func (l *Loop) UpdateSize() error { return sys.ResizeLoop(l.file) }

// GrowLoop makes a device smaller than size bytes as large as its image has become.
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
	if err := l.UpdateSize(); err != nil {
		return err
	}
	crashpoint.Here(crashpoint.GrowDevice)
	return nil
}

func (l *Loop) clear() error {
	err := sys.ClearLoop(l.file)
	if errors.Is(err, unix.ENXIO) {
		return nil
	}
	return err
}

// disableAutoClear clears the flag AUTOCLEAR, which the kernel sets when a device that others have open
// is cleared.
func (l *Loop) disableAutoClear() error {
	info, err := sys.LoopStatus(l.file)
	if err != nil {
		return err
	}
	info.Flags &^= unix.LO_FLAGS_AUTOCLEAR
	return sys.SetLoopStatus(l.file, info)
}

// ErrDeviceBusy means that something has the device open, so that it is still bound.
var ErrDeviceBusy = errors.New("device is still in use")

func busy(number int) error {
	device := LoopPath(number)
	return fmt.Errorf("%s: %w: some process has it open or mounted in a namespace of its own (grep %[1]s /proc/*/mountinfo)", device, ErrDeviceBusy)
}

// DetachLoop frees the device with the tag, and returns when it is free. If others have it
// open for a second, it stays as it is: ErrDeviceBusy. A device with another tag is not
// touched.
func DetachLoop(ctx context.Context, number int, tag string) error {
	return retry.For(ctx, busyTimeout, func() (bool, error) {
		freed, err := tryDetach(number, tag)
		if !freed && err == nil {
			err = busy(number)
		}
		return errors.Is(err, ErrDeviceBusy), err
	})
}

// tryDetach clears a device through the descriptor by which it read the tag: while that is
// open, the number cannot be bound to another image.
func tryDetach(number int, tag string) (freed bool, err error) {
	l, err := OpenLoop(number)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENXIO) {
		return !Bound(number), nil
	}
	if err != nil {
		return false, err
	}
	ours, err := l.clearTagged(tag)
	if err = errors.Join(err, l.Close()); err != nil || !ours {
		return err == nil, err
	}
	return !Bound(number), nil
}

// clearTagged clears the device if it has the tag. The kernel frees it now or when it is
// closed; if others have it open, the kernel only sets AUTOCLEAR, which is cleared again.
func (l *Loop) clearTagged(tag string) (ours bool, err error) {
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

// RecoverLoop completes what AttachLoop may not have finished for a bound device without
// AutoClear: the device stays when it is closed, and refuses discards if keepAllocated is
// set. ok tells whether the device has the tag.
func RecoverLoop(number int, tag string, keepAllocated bool) (ok bool, err error) {
	l, err := OpenLoop(number)
	if errors.Is(err, unix.ENXIO) { // it is being freed
		return false, nil
	}
	if err != nil {
		return false, err
	}
	defer l.Close()
	status, err := l.Status()
	if errors.Is(err, unix.ENXIO) || (err == nil && status.Tag != tag) {
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

// DiskSeq is the sequence number of the device, which changes with each image; empty if the
// kernel has none.
func DiskSeq(number int) string {
	b, err := os.ReadFile(sysLoop(number, "diskseq"))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}

// Bound tells whether the device is bound to an image.
func Bound(number int) bool {
	_, err := os.Stat(sysLoop(number, "loop/backing_file"))
	return err == nil
}

// AwaitFree returns when the device is no longer bound as it was at seq, or ErrDeviceBusy
// after a second.
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
	// BackingFile is the path of the image in the mount namespace that sysfs shows.
	BackingFile string
	// Deleted: the image was removed.
	Deleted bool
}

// BoundLoops lists the bound loop devices whose backing file accept accepts by its path.
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
		b, err := os.ReadFile(sysLoop(number, "loop/backing_file"))
		if err != nil {
			continue
		}
		file, deleted := strings.CutSuffix(strings.TrimSpace(string(b)), " (deleted)")
		if accept(file) {
			bound = append(bound, BoundLoop{number, file, deleted})
		}
	}
	return bound, nil
}

// LoopTag is the tag of a device; empty if it is not bound.
func LoopTag(number int) (string, error) {
	l, err := OpenLoop(number)
	if errors.Is(err, unix.ENXIO) { // it is being freed
		return "", nil
	}
	if err != nil {
		return "", err
	}
	defer l.Close()
	status, err := l.Status()
	if errors.Is(err, unix.ENXIO) {
		return "", nil
	}
	return status.Tag, err
}

// Probe reads the beginning of the image of a loop device past the caches. The errors are
// those of read(2), such as EIO.
func Probe(number int) error {
	fd, err := openNode(number, unix.O_RDONLY|unix.O_DIRECT)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return probe(fd, LoopPath(number))
}

// probe reads the beginning of an open device past the caches.
func probe(fd int, path string) error {
	// open(2) on O_DIRECT wants memory aligned as well; a page is.
	page, err := unix.Mmap(-1, 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return fmt.Errorf("probing %s: mmap: %w", path, err)
	}
	defer func() { _ = unix.Munmap(page) }()
	if _, err := unix.Pread(fd, page, 0); err != nil {
		return &fs.PathError{Op: "read", Path: path, Err: err}
	}
	return nil
}

// Size is the size of a block device, or of an image, in bytes.
func Size(f *os.File) (int64, error) {
	return f.Seek(0, 2)
}
