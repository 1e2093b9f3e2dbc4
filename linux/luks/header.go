package luks

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"

	strict "sigs.k8s.io/json"
)

// ErrNoHeader means that neither copy of a container's header is complete.
var ErrNoHeader = errors.New("no valid LUKS2 header")

// ErrForeignHeader means that a header is valid, but Format does not create such a header. Nothing opens the container,
// because its header may demand any amount of memory and time, or show other data than the whole device.
var ErrForeignHeader = errors.New("the LUKS2 header was not created with the settings of this driver")

// The layout of a header (LUKS2 On-Disk Format Specification, section 2): a binary part and a JSON part. There are two
// copies, one after the other, and then the keyslots.
const (
	binarySize  = 4096
	headerSize  = 16 << 10
	keyslotArea = DataOffset - 2*headerSize
	magicSize   = 6

	versionAt, sizeAt, sequenceAt = 6, 8, 16
	checksumNameAt                = 72
	offsetAt                      = 256
	checksumAt                    = 448
	checksumSize                  = 64
)

// DataOffset is the offset of the data in a container, in bytes. It is the size of the header with its keyslots.
const DataOffset = 16 << 20

// magics are the first bytes of the two copies.
var magics = [2]string{"LUKS\xba\xbe", "SKUL\xba\xbe"}

// otherCopies are the offsets at which cryptsetup searches for the second copy of a header whose first copy is damaged, and
// at which a header of Format has none.
var otherCopies = []int64{32 << 10, 64 << 10, 128 << 10, 256 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20}

// The limits of a header. Each keyslot that a passphrase does not open takes as long as the one that it opens.
const (
	maxKeyslots         = 4
	maxArgonMemory      = 64 << 10 // KiB
	maxArgonTime        = 16
	maxArgonThreads     = 4
	maxPBKDF2Iterations = 10_000_000
)

// Header is the description of a container's data.
type Header struct {
	Cipher     string
	KeyBits    int
	SectorSize int
	// Damaged means that one of the two copies is not valid, or older than the other. RestoreCopy replaces it.
	Damaged bool
}

// headerCopy is a valid copy of a header.
type headerCopy struct {
	Header
	index   int
	content []byte
}

func (c headerCopy) sequence() uint64 { return binary.BigEndian.Uint64(c.content[sequenceAt:]) }

// of returns the content of copy i with the same metadata.
func (c headerCopy) of(i int) []byte {
	b := bytes.Clone(c.content)
	copy(b, magics[i])
	binary.BigEndian.PutUint64(b[offsetAt:], uint64(i)*headerSize)
	sum := checksum(b)
	copy(b[checksumAt:], sum[:])
	return b
}

// checksum returns the checksum of a copy. The field of the checksum counts as zeros.
func checksum(b []byte) [sha256.Size]byte {
	unsigned := bytes.Clone(b)
	clear(unsigned[checksumAt : checksumAt+checksumSize])
	return sha256.Sum256(unsigned)
}

// ReadHeader reads and checks both copies of the header of a container. The error is ErrNoHeader if none is valid, and
// ErrForeignHeader if a valid copy exceeds the limits of this package.
func ReadHeader(device io.ReaderAt) (Header, error) {
	c, err := newestCopy(device)
	return c.Header, err
}

// RestoreCopy durably replaces the other copy of a header by the newest valid one. cryptsetup(8) does this only with its locks,
// which the driver does not use.
func RestoreCopy(device *os.File) error {
	c, err := newestCopy(device)
	if err != nil {
		return err
	}
	other := 1 - c.index
	if _, err := device.WriteAt(c.of(other), int64(other)*headerSize); err != nil {
		return fmt.Errorf("restoring copy %d of the LUKS2 header: %w", other+1, err)
	}
	return device.Sync()
}

// newestCopy is ReadHeader with the content of the newest copy.
func newestCopy(device io.ReaderAt) (headerCopy, error) {
	for _, offset := range otherCopies {
		magic := make([]byte, magicSize)
		if n, _ := device.ReadAt(magic, offset); n == magicSize && string(magic) == magics[1] {
			return headerCopy{}, fmt.Errorf("%w: it has a copy at byte %d", ErrForeignHeader, offset)
		}
	}
	var found []headerCopy
	var damaged error
	for i := range magics {
		c, err := readCopy(device, i)
		switch {
		case err == nil:
			found = append(found, c)
		case errors.Is(err, ErrNoHeader):
			damaged = errors.Join(damaged, err)
		default:
			return headerCopy{}, err
		}
	}
	if len(found) == 0 {
		return headerCopy{}, damaged
	}
	newest, oldest := found[0], found[len(found)-1]
	if newest.Header != oldest.Header {
		return headerCopy{}, fmt.Errorf("%w: its two copies describe different data", ErrForeignHeader)
	}
	if newest.sequence() < oldest.sequence() {
		newest, oldest = oldest, newest
	}
	newest.Damaged = damaged != nil || newest.sequence() != oldest.sequence()
	return newest, nil //nolint:nilerr // Damaged describes the other copy
}

// HasHeader reports whether a device has the magic number of a copy of a header.
func HasHeader(device io.ReaderAt) (bool, error) {
	for i, magic := range magics {
		b := make([]byte, magicSize)
		if _, err := device.ReadAt(b, int64(i)*headerSize); err != nil {
			return false, fmt.Errorf("reading the LUKS2 header: %w", err)
		}
		if string(b) == magic {
			return true, nil
		}
	}
	return false, nil
}

// readCopy reads and checks one copy of a header.
func readCopy(device io.ReaderAt, i int) (headerCopy, error) {
	b := make([]byte, headerSize)
	if _, err := device.ReadAt(b, int64(i)*headerSize); err != nil {
		return headerCopy{}, fmt.Errorf("reading the LUKS2 header: %w", err)
	}
	h, err := parse(b, i)
	return headerCopy{h, i, b}, err
}

// parse checks copy i of a header, which is in the first bytes of b.
func parse(b []byte, i int) (Header, error) {
	be := binary.BigEndian
	if string(b[:magicSize]) != magics[i] {
		return Header{}, fmt.Errorf("%w: copy %d has no magic number", ErrNoHeader, i+1)
	}
	if version := be.Uint16(b[versionAt:]); version != 2 {
		return Header{}, fmt.Errorf("%w: copy %d has version %d", ErrForeignHeader, i+1, version)
	}
	if size := be.Uint64(b[sizeAt:]); size != headerSize {
		return Header{}, fmt.Errorf("%w: copy %d has a size of %d bytes, want %d", ErrForeignHeader, i+1, size, headerSize)
	}
	name, _, _ := bytes.Cut(b[checksumNameAt:checksumNameAt+32], []byte{0})
	if string(name) != "sha256" {
		return Header{}, fmt.Errorf("%w: copy %d has the checksum %.20q, want sha256", ErrForeignHeader, i+1, name)
	}
	if offset := be.Uint64(b[offsetAt:]); offset != uint64(i)*headerSize {
		return Header{}, fmt.Errorf("%w: copy %d is for offset %d", ErrForeignHeader, i+1, offset)
	}
	if sum := checksum(b[:headerSize]); !bytes.Equal(sum[:], b[checksumAt:checksumAt+len(sum)]) {
		return Header{}, fmt.Errorf("%w: copy %d has a wrong checksum", ErrNoHeader, i+1)
	}
	text, rest, _ := bytes.Cut(b[binarySize:headerSize], []byte{0})
	if len(bytes.Trim(rest, "\x00")) > 0 {
		return Header{}, fmt.Errorf("%w: copy %d has data after its metadata", ErrForeignHeader, i+1)
	}
	h, err := parseMetadata(text)
	if err != nil {
		return Header{}, fmt.Errorf("%w: copy %d: %w", ErrForeignHeader, i+1, err)
	}
	return h, nil
}

// metadata is the JSON part of a header (LUKS2 On-Disk Format Specification, section 3). The parser refuses other fields.
type metadata struct {
	Keyslots map[string]keyslot `json:"keyslots"`
	Tokens   map[string]any     `json:"tokens"`
	Segments map[string]segment `json:"segments"`
	Digests  map[string]digest  `json:"digests"`
	Config   config             `json:"config"`
}

type keyslot struct {
	Type    string `json:"type"`
	KeySize int    `json:"key_size"`
	AF      struct {
		Type    string `json:"type"`
		Stripes int    `json:"stripes"`
		Hash    string `json:"hash"`
	} `json:"af"`
	Area struct {
		Type       string  `json:"type"`
		Offset     decimal `json:"offset"`
		Size       decimal `json:"size"`
		Encryption string  `json:"encryption"`
		KeySize    int     `json:"key_size"`
	} `json:"area"`
	KDF struct {
		Type       string `json:"type"`
		Time       int64  `json:"time"`
		Memory     int64  `json:"memory"`
		CPUs       int64  `json:"cpus"`
		Hash       string `json:"hash"`
		Iterations int64  `json:"iterations"`
		Salt       string `json:"salt"`
	} `json:"kdf"`
	Priority *int `json:"priority"`
}

type segment struct {
	Type       string  `json:"type"`
	Offset     decimal `json:"offset"`
	Size       string  `json:"size"`
	IVTweak    decimal `json:"iv_tweak"`
	Encryption string  `json:"encryption"`
	SectorSize int     `json:"sector_size"`
}

type digest struct {
	Type       string   `json:"type"`
	Keyslots   []string `json:"keyslots"`
	Segments   []string `json:"segments"`
	Hash       string   `json:"hash"`
	Iterations int64    `json:"iterations"`
	Salt       string   `json:"salt"`
	Digest     string   `json:"digest"`
}

type config struct {
	JSONSize     decimal `json:"json_size"`
	KeyslotsSize decimal `json:"keyslots_size"`
}

// decimal is an integer that the JSON contains as a string.
type decimal int64

// UnmarshalText implements encoding.TextUnmarshaler. It accepts only the form that cryptsetup writes.
func (d *decimal) UnmarshalText(text []byte) error {
	n, err := strconv.ParseInt(string(text), 10, 64)
	if err != nil || n < 0 || strconv.FormatInt(n, 10) != string(text) {
		return fmt.Errorf("%.30q is not a number", text)
	}
	*d = decimal(n)
	return nil
}

// parseMetadata checks the JSON part of a header.
func parseMetadata(text []byte) (Header, error) {
	var m metadata
	unknown, err := strict.UnmarshalStrict(text, &m)
	if err = errors.Join(append(unknown, err)...); err != nil {
		return Header{}, fmt.Errorf("its metadata: %.300s", err.Error())
	}
	s := m.Segments["0"]
	switch {
	case len(m.Tokens) > 0:
		return Header{}, errors.New("it has tokens")
	case m.Config != config{headerSize - binarySize, keyslotArea}:
		return Header{}, fmt.Errorf("its areas have %d and %d bytes", m.Config.JSONSize, m.Config.KeyslotsSize)
	case len(m.Segments) != 1 || s.Type != "crypt" || s.Offset != DataOffset || s.Size != "dynamic" || s.IVTweak != 0:
		return Header{}, fmt.Errorf("its data is not one segment from byte %d to the end of the device", DataOffset)
	case s.SectorSize != 512 && s.SectorSize != 4096:
		return Header{}, fmt.Errorf("it has sectors of %d bytes", s.SectorSize)
	case len(m.Digests) != 1:
		return Header{}, fmt.Errorf("it has %d digests", len(m.Digests))
	}
	bits, err := checkKeyslots(m.Keyslots)
	if err != nil {
		return Header{}, err
	}
	if err := m.Digests["0"].check(); err != nil {
		return Header{}, err
	}
	return Header{Cipher: s.Encryption, KeyBits: bits, SectorSize: s.SectorSize}, nil
}

// checkKeyslots checks the keyslots, and returns the size of the key that they contain, in bits.
func checkKeyslots(all map[string]keyslot) (bits int, err error) {
	if len(all) == 0 || len(all) > maxKeyslots {
		return 0, fmt.Errorf("it has %d keyslots, want 1 to %d", len(all), maxKeyslots)
	}
	for name, k := range all {
		if err := k.check(); err != nil {
			return 0, fmt.Errorf("keyslot %.20q: %w", name, err)
		}
		if bits != 0 && bits != 8*k.KeySize {
			return 0, errors.New("its keyslots have keys of different sizes")
		}
		bits = 8 * k.KeySize
	}
	return bits, nil
}

func (k keyslot) check() error {
	const stripes = 4000
	a := k.Area
	switch {
	case k.Type != "luks2" || k.AF.Type != "luks1" || k.AF.Stripes != stripes || a.Type != "raw":
		return fmt.Errorf("it is of type %.20q with %.20q, %d stripes, and %.20q", k.Type, k.AF.Type, k.AF.Stripes, a.Type)
	case k.KeySize != 32 && k.KeySize != 64 || a.KeySize != 32 && a.KeySize != 64:
		return fmt.Errorf("its keys have %d and %d bytes", k.KeySize, a.KeySize)
	case a.Offset < 2*headerSize || a.Size < decimal(k.KeySize*stripes) || a.Size > 1<<20 || a.Offset > DataOffset-a.Size:
		return fmt.Errorf("it has %d bytes at byte %d", a.Size, a.Offset)
	}
	return k.checkDerivation()
}

// checkDerivation refuses a derivation of the key that takes too much memory or time.
func (k keyslot) checkDerivation() error {
	d := k.KDF
	switch {
	case d.Type == "pbkdf2" && d.Iterations > 0 && d.Iterations <= maxPBKDF2Iterations:
		return nil
	case d.Type == "pbkdf2":
		return fmt.Errorf("%d iterations, at most %d are allowed", d.Iterations, maxPBKDF2Iterations)
	case d.Type != "argon2id" && d.Type != "argon2i":
		return fmt.Errorf("key derivation %.20q", d.Type)
	case d.Memory <= 0 || d.Memory > maxArgonMemory || d.Time <= 0 || d.Time > maxArgonTime || d.CPUs <= 0 || d.CPUs > maxArgonThreads:
		return fmt.Errorf("%d KiB of memory, %d iterations and %d threads, at most %d KiB, %d and %d are allowed", d.Memory, d.Time, d.CPUs, maxArgonMemory, maxArgonTime, maxArgonThreads)
	}
	return nil
}

func (d digest) check() error {
	if d.Type != "pbkdf2" || d.Iterations <= 0 || d.Iterations > maxPBKDF2Iterations || len(d.Segments) != 1 || len(d.Keyslots) > maxKeyslots {
		return fmt.Errorf("its digest is of type %.20q with %d iterations, %d segments and %d keyslots", d.Type, d.Iterations, len(d.Segments), len(d.Keyslots))
	}
	return nil
}
