package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// templates contains the template of an empty ext4 for each size that was requested.
type templates struct {
	mu     sync.Mutex
	bySize map[int64]template
}

// template contains the blocks of a filesystem that are not zero. Adjacent blocks are one extent.
type template []extent

// extent contains data at an offset in bytes.
type extent struct {
	offset int64
	data   []byte
}

// get returns the template for a size in bytes. To make a new one, it creates a file at scratch.
func (t *templates) get(ctx context.Context, size int64, scratch string) (template, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if made, ok := t.bySize[size]; ok {
		return made, nil
	}
	made, err := makeTemplate(ctx, size, scratch)
	if err != nil {
		return nil, err
	}
	if t.bySize == nil {
		t.bySize = map[int64]template{}
	}
	t.bySize[size] = made
	return made, nil
}

// makeTemplate formats a file of a size in bytes at a path, which it removes, and reads the template from
// it.
func makeTemplate(ctx context.Context, size int64, path string) (template, error) {
	f, err := os.Create(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if err := f.Truncate(size); err != nil {
		return nil, err
	}
	if err := errors.Join(mkfs(ctx, path), os.Remove(path)); err != nil {
		return nil, err
	}
	return readExtents(f) // the open file outlives its name
}

// readExtents reads the blocks of a file that are not zero.
func readExtents(f *os.File) (template, error) {
	var t template
	block, zeros := make([]byte, 4096), make([]byte, 4096)
	for at := int64(0); ; at += int64(len(block)) {
		// SEEK_DATA returns the start of a block.
		start, err := unix.Seek(int(f.Fd()), at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) { // no data after at
			return t, nil
		}
		if err != nil {
			return nil, err
		}
		at = start
		if _, err := f.ReadAt(block, at); err != nil && !errors.Is(err, io.EOF) {
			return nil, err
		}
		if !bytes.Equal(block, zeros) {
			t = t.with(at, block)
		}
	}
}

// with returns the template with one more block, which is behind the last extent.
func (t template) with(offset int64, block []byte) template {
	if n := len(t); n > 0 && t[n-1].offset+int64(len(t[n-1].data)) == offset {
		t[n-1].data = append(t[n-1].data, block...)
		return t
	}
	return append(t, extent{offset, bytes.Clone(block)})
}

// write writes the template to an image that contains only zeros.
func (t template) write(image *os.File) error {
	for _, e := range t {
		if _, err := image.WriteAt(e.data, e.offset); err != nil {
			return err
		}
	}
	return nil
}
