package blockdev

import (
	"bytes"
	"errors"
	"os"
	"slices"
	"testing"

	"github.com/trivet-csi/trivet/internal/crashpoint"
)

// newMemory creates a file of 1 GiB in memory.
func newMemory(t *testing.T) *os.File {
	t.Helper()
	f, err := memoryFile("test")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	if err := f.Truncate(gib); err != nil {
		t.Fatal(err)
	}
	return f
}

// newFile creates a file in memory with a filesystem of 1 GiB that mkfs has created.
func newFile(t *testing.T, fsType string) *os.File {
	t.Helper()
	f := newMemory(t)
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
				t.Errorf("readTemplate of the unchanged filesystem: got error %v, want none", err)
			}
		})
	}
}

// TestIdentities: a copy has identities of its own in the same places as the template, among them the backup superblocks and the
// journal, with valid checksums. It contains no identity of the template.
func TestIdentities(t *testing.T) {
	least := map[string]int{
		"ext4":  5, // superblock, a backup, the journal, and the seed of hashes in both superblocks
		"xfs":   4, // superblock and headers of the first allocation group
		"btrfs": 3, // superblock and its mirror
	}
	for fsType, l := range layouts {
		t.Run(fsType, func(t *testing.T) {
			original, err := readTemplate(newFile(t, fsType), gib, l)
			if err != nil {
				t.Fatal(err)
			}
			f := newMemory(t)
			if err := original.write(f, crashpoint.CreateHalfFormat); err != nil {
				t.Fatal(err)
			}
			made, err := readTemplate(f, gib, l) // verifies that each identity is in a structure with a valid checksum
			if err != nil {
				t.Fatal(err)
			}
			if got, want := made.filePlaces(), original.filePlaces(); !slices.Equal(got, want) || len(want) < least[fsType] {
				t.Errorf("got the places %v in the copy, want those of the template, at least %d: %v", got, least[fsType], want)
			}
			for i, id := range original.identities {
				for _, e := range made.extents {
					if bytes.Contains(e.data, id) {
						t.Errorf("identity %d of the template is in the %d bytes of the copy at byte %d", i, len(e.data), e.offset)
					}
				}
			}
		})
	}
}

// filePlace is where a filesystem contains an identity.
type filePlace struct {
	at       int64 // offset in the filesystem
	identity int
}

// filePlaces returns where a filesystem contains its identities.
func (t *template) filePlaces() (places []filePlace) {
	for _, e := range t.extents {
		for _, s := range e.structures {
			for _, p := range s.places {
				places = append(places, filePlace{e.offset + int64(p.at), p.identity})
			}
		}
	}
	return places
}
