package backend

import (
	"slices"
	"strings"

	"github.com/trivet-csi/trivet/volume"
)

// InlineProvider creates inline volumes, which a pod's manifest describes (volume.Inline). The
// kubelet's ID identifies them.
type InlineProvider interface {
	// InlinePool returns the name of the pool for a new inline volume: the named pool, or by
	// default the first that allows inline volumes. ErrInvalid, without a distinction, for a
	// pool that does not exist or does not allow them.
	InlinePool(name string) (string, error)
	// Inline finds an inline volume by its ID. ErrNotFound; ErrUnavailable while a pool that may
	// contain it is not open; ErrDamaged with the volume's ID alone.
	Inline(id string) (volume.Volume, error)
	// Inlines returns the IDs of all inline volumes without reading the disks.
	// ErrUnavailable, with the IDs found, while a pool that may contain more is not open.
	Inlines() ([]string, error)
}

// InlinePools implements InlineProvider for a backend that embeds it.
type InlinePools struct{ Of *Pools }

var _ InlineProvider = InlinePools{}

// InlinePool implements InlineProvider.
func (i InlinePools) InlinePool(name string) (string, error) {
	var open []string
	for _, s := range i.Of.own() {
		if c, _ := i.Of.Set.Config(s.Name); c.Ephemeral {
			open = append(open, s.Name)
		}
	}
	switch {
	case len(open) == 0:
		return "", volume.Errorf(volume.ErrInvalid, "no pool of this node is open for inline volumes: set ephemeral: true for one in the driver's configuration")
	case name == "":
		return open[0], nil
	case !slices.Contains(open, name):
		return "", volume.Errorf(volume.ErrInvalid, "volume_context.%s=%q: this node has no such pool for inline volumes: name one of %s, or none for the first", volume.ParamPool, name, strings.Join(open, ", "))
	}
	return name, nil
}

// Inline implements InlineProvider.
func (i InlinePools) Inline(id string) (volume.Volume, error) {
	return i.Of.Set.Inline(i.Of.Backend, id)
}

// Inlines implements InlineProvider.
func (i InlinePools) Inlines() ([]string, error) { return i.Of.Set.Inlines(i.Of.Backend) }
