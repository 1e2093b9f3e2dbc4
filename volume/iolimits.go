package volume

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
)

// IOLimits are the limits of each pod for its I/O on the device of a volume. 0 means no limit.
type IOLimits struct {
	ReadIOPS   uint64 `json:"iopsRead,omitempty"`
	WriteIOPS  uint64 `json:"iopsWrite,omitempty"`
	ReadBytes  uint64 `json:"bytesPerSecondRead,omitempty"`
	WriteBytes uint64 `json:"bytesPerSecondWrite,omitempty"`
}

// NoIOLimit is the value of a parameter that removes a limit.
const NoIOLimit = "max"

// The bounds of limits. With less than the minima, single requests of a filesystem would take seconds. The kernel
// has 32 bits for requests per second, and uses the largest number for no limit.
const (
	minIOPS  = 10
	maxIOPS  = math.MaxUint32 - 1
	minBytes = 64 * KiB
)

// IOLimit is a parameter with one of the IOLimits. It is a parameter of a StorageClass, and a mutable parameter.
type IOLimit struct {
	Key string
	// Doc describes the limit.
	Doc   string
	bytes bool
	field func(*IOLimits) *uint64
}

// IOLimitParameters are the parameters with limits.
var IOLimitParameters = []IOLimit{
	{Key: "iopsRead", Doc: "read requests per second", field: func(l *IOLimits) *uint64 { return &l.ReadIOPS }},
	{Key: "iopsWrite", Doc: "write requests per second", field: func(l *IOLimits) *uint64 { return &l.WriteIOPS }},
	{Key: "bytesPerSecondRead", Doc: "bytes read per second", bytes: true, field: func(l *IOLimits) *uint64 { return &l.ReadBytes }},
	{Key: "bytesPerSecondWrite", Doc: "bytes written per second", bytes: true, field: func(l *IOLimits) *uint64 { return &l.WriteBytes }},
}

// Want describes the valid values.
func (l IOLimit) Want() string {
	if l.bytes {
		return fmt.Sprintf("%s, or a number of bytes of at least %s, also with Ki, Mi, Gi or Ti", NoIOLimit, FormatSize(minBytes))
	}
	return fmt.Sprintf("%s, or a number from %d to %d", NoIOLimit, minIOPS, int64(maxIOPS))
}

// Valid reports whether a value is valid.
func (l IOLimit) Valid(value string) bool {
	_, ok := l.parse(value)
	return ok
}

// parse returns the limit of a value. ok is false for an invalid value.
func (l IOLimit) parse(value string) (limit uint64, ok bool) {
	if value == NoIOLimit {
		return 0, true
	}
	if l.bytes {
		n, err := ParseSize(value)
		return uint64(n), err == nil && n >= minBytes
	}
	n, err := strconv.ParseUint(value, 10, 32)
	return n, err == nil && n >= minIOPS && n <= maxIOPS
}

// With returns the limits after a change by mutable parameters. A limit without a parameter stays (CSI specification,
// ControllerModifyVolume). It returns ErrInvalid for an unknown parameter or an invalid value.
func (l IOLimits) With(mutable map[string]string) (IOLimits, error) {
	for _, key := range slices.Sorted(maps.Keys(mutable)) {
		i := slices.IndexFunc(IOLimitParameters, func(p IOLimit) bool { return p.Key == key })
		if i < 0 {
			return l, unknownMutable(key)
		}
		p := IOLimitParameters[i]
		limit, ok := p.parse(mutable[key])
		if !ok {
			return l, Errorf(ErrInvalid, "mutable parameter %s=%.80q: expected %s", key, mutable[key], p.Want())
		}
		*p.field(&l) = limit
	}
	return l, nil
}

// unknownMutable returns the error (ErrInvalid) for a mutable parameter that no volume has.
func unknownMutable(key string) error {
	var known []string
	for _, p := range IOLimitParameters {
		known = append(known, p.Key)
	}
	hint := ""
	if nearest, near := Nearest(key, known); near {
		hint = "; did you mean " + nearest + "?"
	}
	return Errorf(ErrInvalid, "mutable parameter %.80q is unknown: the mutable parameters are %s%s", key, strings.Join(known, ", "), hint)
}

// IOLimits returns the limits in the parameters, which are valid; nil if there are none.
func (p Parameters) IOLimits() *IOLimits {
	var limits *IOLimits
	for _, l := range IOLimitParameters {
		value, given := p.Values[l.Key]
		if !given {
			continue
		}
		if limits == nil {
			limits = &IOLimits{}
		}
		*l.field(limits), _ = l.parse(value)
	}
	return limits
}

// Limits returns the limits of the volume's I/O.
func (v Volume) Limits() IOLimits {
	if v.IOLimits == nil {
		return IOLimits{}
	}
	return *v.IOLimits
}

// Limited reports whether there is a limit.
func (l *IOLimits) Limited() bool { return l != nil && *l != IOLimits{} }
