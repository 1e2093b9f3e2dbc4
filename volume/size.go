package volume

import (
	"cmp"
	"math"
	"regexp"
	"strconv"
)

// Binary units, in bytes.
const (
	KiB int64 = 1 << 10
	MiB int64 = 1 << 20
	GiB int64 = 1 << 30
	TiB int64 = 1 << 40
)

// DefaultSize is the size of a volume in bytes if the request has none.
const DefaultSize = 1 * GiB

// Range is a CSI CapacityRange in bytes; 0 means not set.
type Range struct{ Required, Limit int64 }

// Bounds are the sizes that a backend supports, in bytes: from Min on, those that are multiples of Granule after Overhead
// is added.
type Bounds struct {
	Min, Granule, Overhead int64
	// FSType is the filesystem to which Min applies; empty for a volume without one.
	FSType string
}

// Validate refuses a negative bound and a limit below the requirement
// (ErrInvalid; CSI specification, CapacityRange).
func (r Range) Validate() error {
	switch {
	case r.Required < 0:
		return Errorf(ErrInvalid, "capacity_range.required_bytes is %d: it must not be negative", r.Required)
	case r.Limit < 0:
		return Errorf(ErrInvalid, "capacity_range.limit_bytes is %d: it must not be negative", r.Limit)
	case r.Limit > 0 && r.Limit < r.Required:
		return Errorf(ErrInvalid, "capacity_range.limit_bytes %d is below required_bytes %d", r.Limit, r.Required)
	}
	return nil
}

// Choose returns the size of a new volume: the required size, rounded up to the granule. Without a required size
// it is DefaultSize, raised to the minimum or lowered to the limit. It returns ErrOutOfRange if no size fits.
func (r Range) Choose(b Bounds) (int64, error) {
	if err := r.Validate(); err != nil {
		return 0, err
	}
	want := r.Required
	if want == 0 {
		want = max(DefaultSize, b.Min)
		if r.Limit > 0 && r.Limit < want {
			want = (r.Limit+b.Overhead)/b.Granule*b.Granule - b.Overhead
		}
	}
	if want < b.Min {
		return 0, Errorf(ErrOutOfRange, "capacity_range requests %s, but the smallest volume with %s has %s: request at least that", ExactSize(want), cmp.Or(b.FSType, "these parameters"), ExactSize(b.Min))
	}
	if want > math.MaxInt64-b.Granule-b.Overhead {
		return 0, Errorf(ErrOutOfRange, "capacity_range.required_bytes %d is larger than any volume can be", r.Required)
	}
	size := (want+b.Overhead+b.Granule-1)/b.Granule*b.Granule - b.Overhead
	if r.Limit > 0 && size > r.Limit {
		return 0, Errorf(ErrOutOfRange, "capacity_range.required_bytes %d is not a multiple of %d bytes, and rounded up to %d it exceeds limit_bytes %d: raise the limit", r.Required, b.Granule, size, r.Limit)
	}
	return size, nil
}

// Holds reports whether a volume of size bytes satisfies the range.
func (r Range) Holds(size int64) bool {
	return size >= r.Required && (r.Limit == 0 || size <= r.Limit)
}

var sizePattern = regexp.MustCompile(`^([0-9]+)(Ki|Mi|Gi|Ti)?$`)

// ParseSize reads a size as configuration files write it: bytes, or a whole
// number of Ki, Mi, Gi or Ti. It returns ErrInvalid for any other text.
func ParseSize(s string) (int64, error) {
	m := sizePattern.FindStringSubmatch(s)
	if m == nil {
		return 0, Errorf(ErrInvalid, "size %q: expected a whole number of bytes, or one with Ki, Mi, Gi or Ti", s)
	}
	unit := map[string]int64{"": 1, "Ki": KiB, "Mi": MiB, "Gi": GiB, "Ti": TiB}[m[2]]
	n, err := strconv.ParseInt(m[1], 10, 64)
	if err != nil || n > math.MaxInt64/unit {
		return 0, Errorf(ErrInvalid, "size %q is larger than 2^63-1 bytes", s)
	}
	return n * unit, nil
}

// FormatSize formats a number of bytes for humans: in the largest binary unit that it reaches, rounded down to at
// most one decimal, so that a request for the shown size does not exceed the number. Machine-readable output has
// bytes instead.
func FormatSize(n int64) string {
	unit, name := unitOf(n)
	s := strconv.FormatInt(n/unit, 10)
	if tenths := n % unit * 10 / unit; tenths > 0 {
		s += "." + strconv.FormatInt(tenths, 10)
	}
	return s + " " + name
}

// ExactSize is FormatSize for errors that compare sizes: if the size was rounded, the text also has the bytes.
func ExactSize(n int64) string {
	s := FormatSize(n)
	if unit, _ := unitOf(n); n%unit*10%unit != 0 {
		s += " (" + strconv.FormatInt(n, 10) + " bytes)"
	}
	return s
}

// unitOf returns the unit for a number of bytes, and its name.
func unitOf(n int64) (unit int64, name string) {
	units := []struct {
		size int64
		name string
	}{{TiB, "TiB"}, {GiB, "GiB"}, {MiB, "MiB"}, {KiB, "KiB"}}
	for _, u := range units {
		if n >= u.size {
			return u.size, u.name
		}
	}
	return 1, "B"
}
