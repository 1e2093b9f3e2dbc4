package blockdev

import (
	"bytes"
	"errors"
	"os"
	"slices"
	"strconv"
	"testing"

	"github.com/trivet-csi/trivet/internal/crashpoint"
)

// newMemory creates a file of 1 GiB in memory.
func newMemory(t *testing.T) *os.File {
	t.Helper()
	f, err := memoryFile()
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

// TestTemplateMemory: the templates have the sizes that the comment of maxTemplateMemory gives.
func TestTemplateMemory(t *testing.T) {
	f, sum := NewFormatter(), 0
	for _, tc := range []struct {
		fsType      string
		size        int64
		least, most float64 // MiB
	}{
		{"ext4", gib, 0.5, 0.7},
		{"ext4", 16 * gib, 4, 4.4},
		{"xfs", gib, 0.1, 0.3},
		{"xfs", 16 * gib, 0.1, 0.3},
		{"btrfs", gib, 0.6, 0.9},
		{"btrfs", 16 * gib, 0.6, 0.9},
	} {
		made := f.template(t.Context(), tc.size, FormatSpec{FSType: tc.fsType, SectorSize: 4096})
		if made == nil {
			t.Fatalf("got no template of %s with %d bytes", tc.fsType, tc.size)
		}
		if got := float64(made.size()) / mib; got < tc.least || got > tc.most {
			t.Errorf("got a template of %.2f MiB for %s with %d bytes, want %v to %v MiB", got, tc.fsType, tc.size, tc.least, tc.most)
		}
		sum += made.memory()
	}
	if f.templates.bytes != sum {
		t.Errorf("got %d bytes in the cache, want %d", f.templates.bytes, sum)
	}
}

// TestTemplateCache: the templates that were not used for the longest time are removed when the others exceed the limit. An entry
// that is replaced counts once, and entries without a template are limited, too.
func TestTemplateCache(t *testing.T) {
	c := newTemplateCache()
	large := &template{extents: []extent{{data: make([]byte, maxTemplateSize)}}}
	has := func(want ...string) {
		t.Helper()
		var got []string
		for _, key := range []string{"a", "b", "c", "d"} {
			if _, ok := c.get(key); ok {
				got = append(got, key)
			}
		}
		if !slices.Equal(got, want) || c.bytes != len(want)*large.memory() {
			t.Errorf("got templates %v with %d bytes, want %v", got, c.bytes, want)
		}
	}
	c.add("a", large)
	c.add("b", large)
	c.add("c", large)
	has("a", "b", "c")
	c.get("a")
	c.add("d", large)
	has("a", "c", "d")
	c.add("d", large)
	has("a", "c", "d")
	for i := range 2 * maxTemplateMemory / entryMemory {
		c.add(strconv.Itoa(i), nil)
	}
	if n := c.templates.Len(); c.bytes > maxTemplateMemory || n > maxTemplateMemory/entryMemory {
		t.Errorf("got %d entries with %d bytes, want at most %d bytes", n, c.bytes, maxTemplateMemory)
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
