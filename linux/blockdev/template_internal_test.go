package blockdev

import (
	"errors"
	"os"
	"testing"
)

// newFile creates a file in memory with a filesystem of 1 GiB that mkfs has created.
func newFile(t *testing.T, fsType string) *os.File {
	t.Helper()
	f, err := memoryFile("test")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	if err := f.Truncate(gib); err != nil {
		t.Fatal(err)
	}
	if err := runMkfs(t.Context(), f, gib, FormatSpec{FSType: fsType, SectorSize: 4096}); err != nil {
		t.Fatal(err)
	}
	return f
}

// TestUnsuitable: no template is made of a filesystem with a UUID in an unknown place, or with an unknown checksum.
func TestUnsuitable(t *testing.T) {
	const unused = 700*mib + 5
	checksum := map[string]int64{"ext4": blocksPerGroup*blockSize + superChecksum, "xfs": blockSize + 216, "btrfs": 64 * mib}
	for fsType, l := range layouts {
		t.Run(fsType, func(t *testing.T) {
			f := newFile(t, fsType)
			made, err := readTemplate(f, gib, l)
			if err != nil {
				t.Fatal(err)
			}
			// refuses checks that no template is made while the file has other bytes at an offset.
			refuses := func(what string, offset int64, other []byte) {
				t.Helper()
				before, err := readAt(f, offset, len(other))
				if err == nil {
					_, err = f.WriteAt(other, offset)
				}
				if err != nil {
					t.Fatal(err)
				}
				if _, err := readTemplate(f, gib, l); !errors.Is(err, errUnsuitable) {
					t.Errorf("%s: got %v, want %v", what, err, errUnsuitable)
				}
				if _, err := f.WriteAt(before, offset); err != nil {
					t.Fatal(err)
				}
			}
			for _, id := range made.identities {
				refuses("a UUID in an unused block", unused, id)
			}
			refuses("an unknown checksum", checksum[fsType], []byte("sum"))
			if _, err := readTemplate(f, gib, l); err != nil {
				t.Errorf("the unchanged filesystem: got %v, want a template", err)
			}
		})
	}
}
