package backend

import (
	"slices"
	"strings"

	"github.com/trivet-csi/trivet/volume"
)

// InlineProvider finds inline volumes, which a pod's manifest describes (volume.Inline), by the ID that
// the kubelet gives them, and selects their pools.
type InlineProvider interface {
	// InlinePool returns the name of the pool for a new inline volume: the named pool, or if name
	// is empty the first pool that allows inline volumes. The error (ErrInvalid) is the same for a
	// pool that does not exist and for one that does not allow inline volumes.
	InlinePool(name string) (string, error)
	// Inline finds an inline volume by its ID. ErrNotFound if it does not exist, ErrUnavailable
	// while a pool that may contain it is not open. With ErrDamaged the returned volume has only
	// its ID.
	Inline(id string) (volume.Volume, error)
	// Inlines returns the IDs of all inline volumes, without reading the disks. While a pool that
	// may contain more is not open, it returns the IDs found so far and ErrUnavailable.
	Inlines() ([]string, error)
}

// InlinePools implements InlineProvider for a backend that embeds it.
type InlinePools struct{ Of *Pools }

var _ InlineProvider = InlinePools{}

// InlinePool implements InlineProvider.
func (i InlinePools) InlinePool(name string) (string, error) {
	var allowed []string
	for _, s := range i.Of.poolStates() {
		if c, _ := i.Of.Set.Config(s.Name); c.Ephemeral {
			allowed = append(allowed, s.Name)
		}
	}
	switch {
	case len(allowed) == 0:
		return "", volume.Errorf(volume.ErrInvalid, "no pool of this node allows inline volumes: set ephemeral: true for a pool in the driver's configuration")
	case name == "":
		return allowed[0], nil
	case !slices.Contains(allowed, name):
		return "", volume.Errorf(volume.ErrInvalid, "volume_context.%s=%q: this node has no such pool for inline volumes: name one of %s, or omit the attribute for the first of them", volume.ParamPool, name, strings.Join(allowed, ", "))
	}
	return name, nil
}

// Inline implements InlineProvider.
func (i InlinePools) Inline(id string) (volume.Volume, error) {
	return i.Of.Set.Inline(i.Of.Backend, id)
}

// Inlines implements InlineProvider.
func (i InlinePools) Inlines() ([]string, error) { return i.Of.Set.Inlines(i.Of.Backend) }
