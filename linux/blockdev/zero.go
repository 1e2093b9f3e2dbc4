package blockdev

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/linux/background"
	"github.com/trivet-csi/trivet/linux/sys"
)

// zeroStep is the number of bytes that are zeroed and verified in one step.
const zeroStep = 64 * mib

// ZeroOptions are the options of ZeroRange.
type ZeroOptions struct {
	// Release means that the device may release the storage, provided that it guarantees that the range then reads as zeros.
	Release bool
	// Budget limits the writes.
	Budget *background.Budget
	// Each is called often. It may be nil.
	Each func()
	// Progress is called after each step with the offset up to which all bytes are zero and durable. It ends the call with its error.
	Progress func(upTo int64) error
}

// ZeroRange makes the bytes of a block device from start to end read as zeros.
//
// The result is verified: before each step ZeroRange writes a pattern to the beginning, the middle and
// the end of the step, and reads these places from the device afterwards. If a method fails or leaves
// the pattern, the next, stricter method replaces it. The last method writes zeros.
//
// To continue an interrupted call, pass the last offset that Progress got as start. ZeroRange returns the error of ctx or
// Progress if one of them ended the call. The error is ErrNotBlank if the device keeps its data even if zeros are written.
func ZeroRange(ctx context.Context, device *os.File, start, end int64, o ZeroOptions) error {
	methods := []zeroMethod{zeroOut, overwrite}
	if o.Release {
		methods = append([]zeroMethod{punchOut}, methods...)
	}
	z, err := newZeroing(device, methods, o)
	if err != nil {
		return err
	}
	defer z.close()
	for at := start; at < end; {
		if err := ctx.Err(); err != nil {
			return err
		}
		s := span{at, min(at+zeroStep, end)}
		if err := z.step(ctx, s); err != nil {
			return cmp.Or(ctx.Err(), err)
		}
		if err := o.Progress(s.end); err != nil {
			return err
		}
		at = s.end
	}
	return nil
}

// zeroMethod makes a range read as zeros.
type zeroMethod struct {
	zero func(to *background.Writer, s span) error
	// command reports whether the device does it by commands without data. It is nil if zeros are always written.
	command func(device *os.File) bool
}

// punchOut releases the range. For this mode the kernel uses only operations after which the device
// guarantees zeros, and never writes zeros itself (blkdev_issue_zeroout with BLKDEV_ZERO_NOFALLBACK).
// BLKDISCARD guarantees nothing.
var punchOut = zeroMethod{command: func(*os.File) bool { return true }, zero: func(to *background.Writer, s span) error {
	err := unix.Fallocate(int(to.File.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, s.start, s.end-s.start)
	if err != nil {
		return fmt.Errorf("releasing %s at byte %d: %w", to.File.Name(), s.start, err)
	}
	return nil
}}

// zeroOut zeroes the range and keeps the storage allocated (BLKDEV_ZERO_NOUNMAP).
var zeroOut = zeroMethod{command: hasZeroCommand, zero: func(to *background.Writer, s span) error {
	if err := sys.ZeroOut(to.File, s.start, s.end-s.start); err != nil {
		return fmt.Errorf("zeroing %s at byte %d: %w", to.File.Name(), s.start, err)
	}
	return nil
}}

// overwrite writes zeros to the range.
var overwrite = zeroMethod{zero: func(to *background.Writer, s span) error {
	if err := writeZeros(to, s); err != nil {
		return fmt.Errorf("writing zeros to %s at byte %d: %w", to.File.Name(), s.start, err)
	}
	return nil
}}

// hasZeroCommand reports whether the kernel zeroes a range of a device by commands without data (write_zeroes_max_bytes in
// Documentation/ABI/stable/sysfs-block of Linux). If such a command fails, the kernel writes zeros, and the limit becomes 0.
func hasZeroCommand(device *os.File) bool {
	var st unix.Stat_t
	if err := unix.Fstat(int(device.Fd()), &st); err != nil {
		return false
	}
	limit, err := readNumber(fmt.Sprintf("/sys/dev/block/%d:%d/queue/write_zeroes_max_bytes", unix.Major(st.Rdev), unix.Minor(st.Rdev)))
	return err == nil && limit > 0
}

// apply applies the method to a range. With a budget, zeros are written in pieces. Only the time of commands counts, not their bytes.
func (m zeroMethod) apply(ctx context.Context, to *background.Writer, s span, o ZeroOptions) error {
	writes := m.command == nil || !m.command(to.File)
	for at := s.start; at < s.end; {
		piece := span{at, s.end}
		if writes {
			piece.end = at + min(o.Budget.PieceSize(), s.end-at)
		}
		at = piece.end
		if o.Each != nil {
			o.Each()
		}
		err := o.Budget.Do(ctx, func() (bytes int64, err error) {
			if writes {
				bytes = piece.end - piece.start
			}
			return bytes, o.Budget.Idle(func() error { return m.zero(to, piece) })
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// zeroing is one call of ZeroRange.
type zeroing struct {
	device *os.File
	// to writes to the device within the budget.
	to *background.Writer
	// direct is the same device, open with O_DIRECT.
	direct  *os.File
	methods []zeroMethod
	options ZeroOptions
	// pattern is written to parts of the device, and sample is the buffer into which they are read again.
	// Both are aligned for O_DIRECT.
	pattern, sample []byte
}

// newZeroing opens the device for direct I/O. The caller closes the result.
func newZeroing(device *os.File, methods []zeroMethod, o ZeroOptions) (*zeroing, error) {
	sector, err := sys.SectorSize(device)
	if err != nil {
		return nil, err
	}
	direct, err := os.OpenFile(sys.Path(device), os.O_RDWR|unix.O_DIRECT, 0)
	if err != nil {
		return nil, fmt.Errorf("opening %s for direct I/O: %w", device.Name(), err)
	}
	to, err := o.Budget.Writer(device)
	if err != nil {
		return nil, errors.Join(err, direct.Close())
	}
	z := &zeroing{device: device, to: to, direct: direct, methods: methods, options: o}
	size := max(os.Getpagesize(), sector)
	memory, err := unix.Mmap(-1, 0, 2*size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		to.Close()
		return nil, errors.Join(fmt.Errorf("mmap: %w", err), direct.Close())
	}
	z.pattern, z.sample = memory[:size], memory[size:]
	copy(z.pattern, bytes.Repeat([]byte{0xa5}, size))
	return z, nil
}

func (z *zeroing) close() {
	_ = unix.Munmap(z.pattern[:cap(z.pattern)])
	z.to.Close()
	_ = z.direct.Close()
}

// step zeroes a range by the first method that succeeds. It returns only the error of the last method, because
// a disk may reject a command with any error and still accept writes.
func (z *zeroing) step(ctx context.Context, s span) error {
	for {
		err := z.try(ctx, s)
		if err == nil || ctx.Err() != nil || len(z.methods) == 1 {
			return err
		}
		z.methods = z.methods[1:]
	}
}

// try zeroes a range by the first method, and verifies the result.
func (z *zeroing) try(ctx context.Context, s span) error {
	samples := z.samples(s)
	for _, p := range samples {
		if _, err := z.direct.WriteAt(z.pattern[:p.end-p.start], p.start); err != nil {
			return err
		}
	}
	if err := z.methods[0].apply(ctx, z.to, s, z.options); err != nil {
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
