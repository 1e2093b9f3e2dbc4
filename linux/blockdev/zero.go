package blockdev

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/linux/sys"
)

// zeroStep is the number of bytes that are zeroed and verified in one step.
const zeroStep = 64 * mib

// ZeroRange makes the bytes of a block device from start to end read as zeros. If release is set, the
// device may release the storage, provided that it guarantees that the range then reads as zeros.
//
// The result is verified: before each step ZeroRange writes a pattern to the beginning, the middle and
// the end of the step, and reads these places from the device afterwards. If a method fails or leaves
// the pattern, the next, stricter method replaces it. The last method writes zeros.
//
// After each step ZeroRange calls progress with the offset up to which all bytes are zero and durable. To continue an
// interrupted call, pass that offset as start. ZeroRange returns the error of ctx or progress if one of them ended
// the call. The error is ErrNotBlank if the device keeps its data even if zeros are written.
func ZeroRange(ctx context.Context, device *os.File, start, end int64, release bool, progress func(upTo int64) error) error {
	methods := []zeroMethod{zeroOut, overwrite}
	if release {
		methods = append([]zeroMethod{punchOut}, methods...)
	}
	z, err := newZeroing(device, methods)
	if err != nil {
		return err
	}
	defer z.close()
	for at := start; at < end; {
		if err := ctx.Err(); err != nil {
			return err
		}
		s := span{at, min(at+zeroStep, end)}
		if err := z.step(s); err != nil {
			return err
		}
		if err := progress(s.end); err != nil {
			return err
		}
		at = s.end
	}
	return nil
}

// zeroMethod makes a range read as zeros.
type zeroMethod func(device *os.File, s span) error

// punchOut releases the range. For this mode the kernel uses only operations after which the device
// guarantees zeros, and never writes zeros itself (blkdev_issue_zeroout with BLKDEV_ZERO_NOFALLBACK).
// BLKDISCARD guarantees nothing.
func punchOut(device *os.File, s span) error {
	err := unix.Fallocate(int(device.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, s.start, s.end-s.start)
	if err != nil {
		return fmt.Errorf("releasing %s at byte %d: %w", device.Name(), s.start, err)
	}
	return nil
}

// zeroOut zeroes the range and keeps the storage allocated (BLKDEV_ZERO_NOUNMAP).
func zeroOut(device *os.File, s span) error {
	if err := sys.ZeroOut(device, s.start, s.end-s.start); err != nil {
		return fmt.Errorf("zeroing %s at byte %d: %w", device.Name(), s.start, err)
	}
	return nil
}

// overwrite writes zeros to the range.
func overwrite(device *os.File, s span) error { return zeroIn(device, []span{s}) }

// zeroing is one call of ZeroRange.
type zeroing struct {
	device *os.File
	// direct is the same device, open with O_DIRECT.
	direct  *os.File
	methods []zeroMethod
	// pattern is written to parts of the device, and sample is the buffer into which they are read again.
	// Both are aligned for O_DIRECT.
	pattern, sample []byte
}

// newZeroing opens the device for direct I/O. The caller closes the result.
func newZeroing(device *os.File, methods []zeroMethod) (*zeroing, error) {
	sector, err := sys.SectorSize(device)
	if err != nil {
		return nil, err
	}
	direct, err := os.OpenFile(sys.Path(device), os.O_RDWR|unix.O_DIRECT, 0)
	if err != nil {
		return nil, fmt.Errorf("opening %s for direct I/O: %w", device.Name(), err)
	}
	z := &zeroing{device: device, direct: direct, methods: methods}
	size := max(os.Getpagesize(), sector)
	memory, err := unix.Mmap(-1, 0, 2*size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("mmap: %w", err), z.direct.Close())
	}
	z.pattern, z.sample = memory[:size], memory[size:]
	copy(z.pattern, bytes.Repeat([]byte{0xa5}, size))
	return z, nil
}

func (z *zeroing) close() {
	_ = unix.Munmap(z.pattern[:cap(z.pattern)])
	_ = z.direct.Close()
}

// step zeroes a range by the first method that succeeds. It returns only the error of the last method, because
// a disk may reject a command with any error and still accept writes.
func (z *zeroing) step(s span) error {
	for {
		err := z.try(s)
		if err == nil || len(z.methods) == 1 {
			return err
		}
		z.methods = z.methods[1:]
	}
}

// try zeroes a range by the first method, and verifies the result.
func (z *zeroing) try(s span) error {
	samples := z.samples(s)
	for _, p := range samples {
		if _, err := z.direct.WriteAt(z.pattern[:p.end-p.start], p.start); err != nil {
			return err
		}
	}
	if err := z.methods[0](z.device, s); err != nil {
		return err
	}
	if err := z.device.Sync(); err != nil {
		return err
	}
	for _, p := range samples {
		if err := requireZerosWith(z.direct, z.sample, p); err != nil {
			return fmt.Errorf("%s keeps its data when it is zeroed: %w", z.device.Name(), err)
		}
	}
	return nil
}

// samples returns the beginning, the middle and the end of a range. Like the range, they are aligned to
// sectors.
func (z *zeroing) samples(s span) []span {
	size := int64(len(z.sample))
	middle := s.start + (s.end-s.start)/2/size*size
	last := max(s.start, s.end-size)
	return clip([]span{{s.start, s.start + size}, {middle, middle + size}, {last, s.end}}, s.end)
}
