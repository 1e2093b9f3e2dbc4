package sanity

import (
	"fmt"
	"testing"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/volume"
)

// ids generates IDs of volumes and nodes that do not exist. The suite calls it from one
// goroutine.
type ids struct {
	like volume.ID // the generated IDs of volumes differ only in the name
	made int       // the number of generated IDs
}

// unique returns a name that begins with prefix and differs from all earlier ones.
func (g *ids) unique(prefix string) string {
	g.made++
	return fmt.Sprintf("%s-%d", prefix, g.made)
}

// GenerateUniqueValidVolumeID returns an ID in this driver's format.
func (g *ids) GenerateUniqueValidVolumeID() string {
	id := g.like
	id.Name = g.unique("made-up")
	return id.String()
}

// GenerateInvalidVolumeID returns an ID that is not in this driver's format.
func (g *ids) GenerateInvalidVolumeID() string { return g.unique("Other driver/volume") }

// GenerateUniqueValidNodeID returns the name of a node that could be in the cluster.
func (g *ids) GenerateUniqueValidNodeID() string { return g.unique("node") + ".example" }

// GenerateInvalidNodeID returns a name that no node can have.
func (g *ids) GenerateInvalidNodeID() string { return g.unique("no/node") }

// uuidOf returns the part of a pool's UUID that the IDs of its volumes contain.
func uuidOf(t *testing.T, poolDir string) string {
	t.Helper()
	uuid, err := testenv.PoolUUID(poolDir)
	if err != nil {
		t.Fatal(err)
	}
	return uuid[:8]
}
