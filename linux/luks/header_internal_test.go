package luks

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// sample returns the header that cryptsetup 2.6 created with the arguments of Format.
func sample(tb testing.TB) []byte {
	tb.Helper()
	f, err := os.Open("testdata/header.gz")
	if err != nil {
		tb.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		tb.Fatal(err)
	}
	b, err := io.ReadAll(z)
	if err != nil || len(b) != 2*headerSize {
		tb.Fatalf("got %d bytes, %v", len(b), err)
	}
	return b
}

// device returns a device with a header.
func device(header []byte) *bytes.Reader {
	b := make([]byte, DataOffset)
	copy(b, header)
	return bytes.NewReader(b)
}

// sign sets the checksum of a copy.
func sign(b []byte) {
	clear(b[checksumAt : checksumAt+checksumSize])
	sum := sha256.Sum256(b[:headerSize])
	copy(b[checksumAt:], sum[:])
}

// edit replaces text in the metadata of a copy, and signs it.
func edit(tb testing.TB, b []byte, from, to string) {
	tb.Helper()
	text, _, _ := bytes.Cut(b[binarySize:headerSize], []byte{0})
	if !bytes.Contains(text, []byte(from)) {
		tb.Fatalf("the metadata does not contain %s", from)
	}
	text = bytes.Replace(bytes.Clone(text), []byte(from), []byte(to), 1)
	clear(b[binarySize:headerSize])
	if copy(b[binarySize:headerSize], text) != len(text) {
		tb.Fatal("the metadata is too long")
	}
	sign(b)
}

var sampleHeader = Header{Cipher: "aes-xts-plain64", KeyBits: 512, SectorSize: 4096}

// TestReadHeader: a header of cryptsetup is read. If one of its copies is damaged, the other is used.
func TestReadHeader(t *testing.T) {
	for _, tc := range []struct {
		name string
		from int // the first damaged byte
		to   int
		want Header
		err  error
	}{
		{"intact", 0, 0, sampleHeader, nil},
		{"first copy damaged", 0, 4096, Header{"aes-xts-plain64", 512, 4096, true}, nil},
		{"first metadata damaged", 4200, 4300, Header{"aes-xts-plain64", 512, 4096, true}, nil},
		{"second copy damaged", headerSize, headerSize + 4096, Header{"aes-xts-plain64", 512, 4096, true}, nil},
		{"both damaged", 4200, headerSize + 4300, Header{}, ErrNoHeader},
		{"erased", 0, 2 * headerSize, Header{}, ErrNoHeader},
	} {
		t.Run(tc.name, func(t *testing.T) {
			b := sample(t)
			clear(b[tc.from:tc.to])
			got, err := ReadHeader(device(b))
			if got != tc.want || !errors.Is(err, tc.err) {
				t.Errorf("got %+v, %v, want %+v, %v", got, err, tc.want, tc.err)
			}
		})
	}
	if _, err := ReadHeader(bytes.NewReader(sample(t)[:5000])); err == nil {
		t.Error("a device that is too short is accepted")
	}
}

// TestForeignHeader: a header with a valid checksum is refused if its values are not those of Format, whichever copy
// contains them.
func TestForeignHeader(t *testing.T) {
	slot := func(tb testing.TB) string {
		tb.Helper()
		text, _, _ := bytes.Cut(sample(tb)[binarySize:], []byte{0})
		from, to := bytes.Index(text, []byte(`{"type":"luks2"`)), bytes.Index(text, []byte(`},"tokens"`))
		return string(text[from:to])
	}(t)
	for name, tc := range map[string]struct{ from, to, want string }{
		"memory":         {`"memory":32768`, `"memory":4194304`, "KiB of memory"},
		"iterations":     {`"time":4`, `"time":4294967295`, "iterations"},
		"threads":        {`"cpus":1`, `"cpus":128`, "threads"},
		"negative":       {`"memory":32768`, `"memory":-1`, "KiB of memory"},
		"overflow":       {`"memory":32768`, `"memory":18446744073709551617`, "metadata"},
		"derivation":     {`"type":"argon2id"`, `"type":"scrypt"`, "scrypt"},
		"pbkdf2":         {`"type":"argon2id"`, `"iterations":4000000000,"type":"pbkdf2"`, "iterations"},
		"digest":         {`"iterations":1000`, `"iterations":2000000000`, "digest"},
		"no digest":      {`"digests":{"0"`, `"digests":{"1"`, "digest"},
		"keyslots":       {slot, slot + `,"1":` + slot + `,"2":` + slot + `,"3":` + slot + `,"4":` + slot, "5 keyslots"},
		"no keyslot":     {`"0":` + slot, ``, "0 keyslots"},
		"key of 0":       {`"key_size":64`, `"key_size":0`, "keys"},
		"stripes":        {`"stripes":4000`, `"stripes":400000000`, "stripes"},
		"area outside":   {`"offset":"32768"`, `"offset":"16777216"`, "bytes at byte"},
		"area in header": {`"offset":"32768"`, `"offset":"0"`, "bytes at byte"},
		"area too large": {`"size":"258048"`, `"size":"16744448"`, "bytes at byte"},
		"area too small": {`"size":"258048"`, `"size":"4096"`, "bytes at byte"},
		"segment":        {`"offset":"16777216"`, `"offset":"4096"`, "one segment"},
		"segment size":   {`"size":"dynamic"`, `"size":"4096"`, "one segment"},
		"linear":         {`"type":"crypt"`, `"type":"linear"`, "one segment"},
		"tweak":          {`"iv_tweak":"0"`, `"iv_tweak":"8"`, "one segment"},
		"sector":         {`"sector_size":4096`, `"sector_size":1048576`, "sectors"},
		"integrity":      {`"sector_size":4096`, `"sector_size":4096,"integrity":{"type":"none"}`, "unknown field"},
		"token":          {`"tokens":{}`, `"tokens":{"0":{"type":"systemd-tpm2","keyslots":["0"]}}`, "tokens"},
		"requirements":   {`"json_size":"12288"`, `"json_size":"12288","requirements":{"mandatory":["online-reencrypt"]}`, "unknown field"},
		"area sizes":     {`"keyslots_size":"16744448"`, `"keyslots_size":"4096"`, "areas"},
		"number":         {`"json_size":"12288"`, `"json_size":"012288"`, "not a number"},
		"twice":          {`"memory":32768`, `"memory":32768,"memory":4194304`, "duplicate"},
		"other case":     {`"memory":32768`, `"memory":32768,"Memory":4194304`, "unknown field"},
		"not JSON":       {`"tokens":{}`, `"tokens":{}/*`, "metadata"},
	} {
		for i := range magics {
			t.Run(name, func(t *testing.T) {
				b := sample(t)
				edit(t, b[i*headerSize:], tc.from, tc.to)
				_, err := ReadHeader(device(b))
				if !errors.Is(err, ErrForeignHeader) || !strings.Contains(err.Error(), tc.want) {
					t.Errorf("copy %d: got %v, want an ErrForeignHeader with %q", i+1, err, tc.want)
				}
			})
		}
	}
}

// TestForeignBinary: the same for the binary part of a header.
func TestForeignBinary(t *testing.T) {
	for name, change := range map[string]func(b []byte){
		"LUKS1":    func(b []byte) { binary.BigEndian.PutUint16(b[versionAt:], 1) },
		"size":     func(b []byte) { binary.BigEndian.PutUint64(b[sizeAt:], 4<<20) },
		"offset":   func(b []byte) { binary.BigEndian.PutUint64(b[offsetAt:], 1<<40) },
		"checksum": func(b []byte) { copy(b[checksumNameAt:], "sha512") },
		"rest":     func(b []byte) { b[headerSize-1] = 1 },
	} {
		for i := range magics {
			b := sample(t)
			change(b[i*headerSize:])
			sign(b[i*headerSize:])
			if _, err := ReadHeader(device(b)); !errors.Is(err, ErrForeignHeader) {
				t.Errorf("%s in copy %d: got %v, want ErrForeignHeader", name, i+1, err)
			}
		}
	}
	for _, offset := range otherCopies {
		b := make([]byte, DataOffset)
		copy(b, sample(t))
		copy(b[offset:], magics[1])
		if _, err := ReadHeader(bytes.NewReader(b)); !errors.Is(err, ErrForeignHeader) {
			t.Errorf("a copy at byte %d: got %v, want ErrForeignHeader", offset, err)
		}
	}
	b := sample(t)
	edit(t, b, `"sector_size":4096`, `"sector_size":512`)
	if _, err := ReadHeader(device(b)); !errors.Is(err, ErrForeignHeader) {
		t.Errorf("two copies with different data: got %v, want ErrForeignHeader", err)
	}
}

// FuzzReadHeader: any header is either refused, or within the limits.
func FuzzReadHeader(f *testing.F) {
	text, _, _ := bytes.Cut(sample(f)[binarySize:headerSize], []byte{0})
	f.Add(text, true)
	f.Add(sample(f), false)
	f.Fuzz(func(t *testing.T, b []byte, signed bool) {
		header := sample(t)
		if signed { // b is the metadata of a header with a valid checksum
			clear(header[binarySize:headerSize])
			copy(header[binarySize:headerSize], b)
			sign(header)
			clear(header[headerSize:])
		} else {
			clear(header)
			copy(header, b)
		}
		h, err := ReadHeader(device(header))
		if err == nil && (h.KeyBits != 256 && h.KeyBits != 512 || h.SectorSize != 512 && h.SectorSize != 4096) {
			t.Errorf("accepted %+v", h)
		}
		if err != nil && !errors.Is(err, ErrNoHeader) && !errors.Is(err, ErrForeignHeader) {
			t.Errorf("got %v, want ErrNoHeader or ErrForeignHeader", err)
		}
	})
}

// TestRestoreCopy: a damaged copy, and an older one, is replaced by the other. The result is what cryptsetup wrote, except
// the salt of the copy.
func TestRestoreCopy(t *testing.T) {
	older := sample(t)
	binary.BigEndian.PutUint64(older[sequenceAt:], binary.BigEndian.Uint64(older[sequenceAt:])-1)
	sign(older)
	for name, header := range map[string][]byte{
		"first damaged":  append(make([]byte, headerSize), sample(t)[headerSize:]...),
		"second damaged": append(sample(t)[:headerSize], make([]byte, headerSize)...),
		"first older":    older,
	} {
		f, err := os.Create(filepath.Join(t.TempDir(), "device"))
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		if _, err := f.Write(header); err != nil {
			t.Fatal(err)
		}
		if err := f.Truncate(DataOffset); err != nil {
			t.Fatal(err)
		}
		if h, err := ReadHeader(f); err != nil || !h.Damaged {
			t.Fatalf("%s: got %+v, %v, want a damaged header", name, h, err)
		}
		if err := RestoreCopy(f); err != nil {
			t.Fatal(err)
		}
		if h, err := ReadHeader(f); err != nil || h != sampleHeader {
			t.Errorf("%s: got %+v, %v after the copy was restored", name, h, err)
		}
		for i := range magics {
			got, err := readCopy(f, i)
			if err != nil {
				t.Fatal(err)
			}
			want := sample(t)[i*headerSize:][:headerSize]
			if !bytes.Equal(got.content[binarySize:], want[binarySize:]) || got.sequence() != binary.BigEndian.Uint64(want[sequenceAt:]) {
				t.Errorf("%s: the metadata or the sequence number of copy %d has changed", name, i+1)
			}
		}
	}
}
