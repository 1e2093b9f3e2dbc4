package volume

import "time"

// Manifest describes the content of a snapshot or a volume that is sent to another node.
type Manifest struct {
	// Identity differs for each content. An interrupted transfer continues only with the same content.
	Identity string `json:"identity"`
	// Lineage is the volume of which the content is a snapshot. It is zero if the content is not a snapshot.
	Lineage ID `json:"lineage,omitzero"`
	// Created is the time at which the snapshot was taken. It is zero if the content is not a snapshot.
	Created time.Time `json:"created,omitzero"`
	// Size is the minimum capacity of a volume with this content, in bytes. Bytes is the size of the data
	// without holes.
	Size       int64       `json:"sizeBytes"`
	Bytes      int64       `json:"bytes"`
	Block      bool        `json:"block,omitempty"`
	FSType     string      `json:"fsType,omitempty"`
	SectorSize int         `json:"sectorSize"`
	Encryption *Encryption `json:"encryption,omitempty"`
	// Formatted is true if the content is a complete filesystem.
	Formatted bool `json:"formatted,omitempty"`
	// Tree is set if the content is a directory.
	Tree *PackedTree `json:"tree,omitempty"`
}

// PackedTree describes how a directory is sent: as an index of all entries, and the content of its files (linux/clone).
type PackedTree struct {
	// IndexSize is the size of the index, whose second half says from which files of a base the files differ, and Size that of the
	// index and all files including holes, in bytes.
	IndexSize int64 `json:"indexBytes"`
	Size      int64 `json:"sizeBytes"`
	// Layout differs if the same offset can have another meaning.
	Layout string `json:"layout"`
}

// minIndexLimit is a size in bytes that an index may have even if the volume is smaller. It is that of millions of entries.
const minIndexLimit = 2 << 30

// checkTree refuses values that no driver sends for a directory (ErrDamaged).
func (m Manifest) checkTree() error {
	t := m.Tree
	if t.IndexSize <= 0 || t.IndexSize > t.Size || t.Size > maxManifestSize || t.IndexSize > max(minIndexLimit, m.Size) || t.Layout == "" {
		return Errorf(ErrDamaged, "the description of the source has an invalid directory: indexBytes %d, sizeBytes %d, layout %q", t.IndexSize, t.Size, t.Layout)
	}
	if m.Block || m.FSType != "" || m.Formatted || m.SectorSize != 0 || m.Encryption != nil {
		return Errorf(ErrDamaged, "the description of the source has an invalid combination: a directory with block %t, fsType %q, formatted %t, sectorSize %d or an encryption", m.Block, m.FSType, m.Formatted, m.SectorSize)
	}
	return nil
}

// Layout is that of a directory, and empty for other content.
func (m Manifest) Layout() string {
	if m.Tree == nil {
		return ""
	}
	return m.Tree.Layout
}

// maxManifestSize is larger than every volume of a filesystem that Linux supports.
const maxManifestSize = 1 << 62

// Check refuses values that no driver sends for a source (ErrDamaged). The values come from another machine.
func (m Manifest) Check(source Source) error {
	pool := m.Lineage
	pool.Name = source.ID.Name
	switch {
	case m.Lineage != (ID{}) && pool != source.ID: // another node must not get what this node has received from elsewhere
		return Errorf(ErrDamaged, "the description of %v says that it is a snapshot of %s, which is in another pool", &source, m.Lineage)
	case m.Identity == "", m.Size <= 0, m.Size > maxManifestSize, m.Bytes < 0:
		return Errorf(ErrDamaged, "the description of the source has the invalid identity %q, sizeBytes %d or bytes %d", m.Identity, m.Size, m.Bytes)
	case m.Tree != nil:
		return m.checkTree()
	case m.Block == (m.FSType != ""), !m.Block && !ValidFSType(m.FSType), m.Block && m.Formatted, m.SectorSize != 512 && m.SectorSize != 4096:
		return Errorf(ErrDamaged, "the description of the source has an invalid combination: block %t, fsType %q, formatted %t, sectorSize %d", m.Block, m.FSType, m.Formatted, m.SectorSize)
	}
	return m.Encryption.check()
}

// StorageSize is the size of the content in bytes: Size, and the header of an encrypted volume. For a directory it is the size of
// the packed tree.
func (m Manifest) StorageSize() int64 {
	if m.Tree != nil {
		return m.Tree.Size
	}
	return m.Size + m.Encryption.overhead()
}

// Volume returns the fields of a volume's record that the content determines.
func (m Manifest) Volume() Volume {
	return Volume{Capacity: m.Size, Block: m.Block, FSType: m.FSType, SectorSize: m.SectorSize, Encryption: m.Encryption}
}

// ParamCopies is the StorageClass parameter that says where a volume with a source is created.
const ParamCopies = "copies"

const (
	// CopiesAnywhere creates the volume on the node that is requested. The content is sent to that node.
	CopiesAnywhere = "anywhere"
	// CopiesLocal creates the volume on the node of its source.
	CopiesLocal = "local"
)

// ParamProtect is the StorageClass parameter with the time between two copies of each claim of the class on another node.
const ParamProtect = "protect"

// CopyPeriods are the times between two copies that a CronJob can express.
var CopyPeriods = []string{"1m", "2m", "3m", "4m", "5m", "6m", "10m", "12m", "15m", "20m", "30m", "1h", "2h", "3h", "4h", "6h", "8h", "12h", "24h"}
