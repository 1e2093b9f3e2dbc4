package main

import (
	"context"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// attach binds an image to a free loop device. The device frees itself when the returned file
// is closed and nothing has it mounted.
func attach(ctx context.Context, image *os.File) (*os.File, error) {
	control, err := unix.Open("/dev/loop-control", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	defer unix.Close(control)
	config := unix.LoopConfig{Fd: uint32(image.Fd()), Size: 4096}
	config.Info.Flags = unix.LO_FLAGS_DIRECT_IO | unix.LO_FLAGS_AUTOCLEAR
	for ctx.Err() == nil {
		number, err := unix.IoctlRetInt(control, unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return nil, fmt.Errorf("LOOP_CTL_GET_FREE: %w", err)
		}
		device, err := configure(fmt.Sprintf("/dev/loop%d", number), &config)
		if errors.Is(err, unix.EBUSY) || errors.Is(err, unix.ENXIO) || errors.Is(err, unix.ENOENT) {
			continue // another was quicker to take, or remove, this number
		}
		return device, err
	}
	return nil, ctx.Err()
}

func configure(path string, config *unix.LoopConfig) (*os.File, error) {
	fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if err := unix.IoctlLoopConfigure(fd, config); err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("%s: LOOP_CONFIGURE: %w", path, err)
	}
	return os.NewFile(uintptr(fd), path), nil
}

// awaitUnbound returns when a loop device no longer has the image.
func awaitUnbound(ctx context.Context, number uint32, image string) error {
	// time.Sleep of less than a millisecond takes one in a process that is idle.
	wait := unix.Timespec{Nsec: 50_000}
	for ctx.Err() == nil {
		if backingFile(fmt.Sprintf("loop%d", number)) != image { // freed, or another's by now
			return nil
		}
		_ = unix.Nanosleep(&wait, nil) // cut short, it looks sooner
	}
	return ctx.Err()
}
