package main

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/linux/sys"
	"github.com/trivet-csi/trivet/test/measure"
)

// attach binds an image to a free loop device. The kernel unbinds the device (autoclear) when the
// returned file is closed and the device is not mounted.
func attach(ctx context.Context, image *os.File) (*os.File, error) {
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer control.Close()
	config := unix.LoopConfig{Fd: uint32(image.Fd()), Size: 4096} // Size is the sector size in bytes
	config.Info.Flags = unix.LO_FLAGS_DIRECT_IO | unix.LO_FLAGS_AUTOCLEAR
	for ctx.Err() == nil {
		number, err := sys.FreeLoop(control)
		if err != nil {
			return nil, err
		}
		device, err := configure(fmt.Sprintf("/dev/loop%d", number), &config)
		if errors.Is(err, unix.EBUSY) || errors.Is(err, unix.ENXIO) || errors.Is(err, unix.ENOENT) {
			continue // another process bound or removed the device after FreeLoop
		}
		return device, err
	}
	return nil, ctx.Err()
}

// configure opens a loop device and binds it with LOOP_CONFIGURE (loop(4)).
func configure(path string, config *unix.LoopConfig) (*os.File, error) {
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	device := os.NewFile(uintptr(fd), path)
	if err := sys.ConfigureLoop(device, config); err != nil {
		device.Close()
		return nil, err
	}
	return device, nil
}

// awaitUnbound returns when the loop device is no longer bound to the image.
func awaitUnbound(ctx context.Context, device, image string) error {
	// The loop calls nanosleep(2), because time.Sleep takes at least a millisecond in an idle process.
	wait := unix.Timespec{Nsec: 50_000}
	for ctx.Err() == nil {
		if measure.BackingFile(device) != image {
			return nil // unbound, or bound to another file since
		}
		_ = unix.Nanosleep(&wait, nil) // after an interrupted sleep the next poll is only earlier
	}
	return ctx.Err()
}
