package volume

import (
	"slices"
	"strings"
)

// AccessMode is a CSI access mode by its name in the specification.
type AccessMode string

// The access modes of CSI 1.13.
const (
	SingleNodeWriter       AccessMode = "SINGLE_NODE_WRITER"
	SingleNodeReaderOnly   AccessMode = "SINGLE_NODE_READER_ONLY"
	SingleNodeSingleWriter AccessMode = "SINGLE_NODE_SINGLE_WRITER"
	SingleNodeMultiWriter  AccessMode = "SINGLE_NODE_MULTI_WRITER"
	MultiNodeReaderOnly    AccessMode = "MULTI_NODE_READER_ONLY"
	MultiNodeSingleWriter  AccessMode = "MULTI_NODE_SINGLE_WRITER"
	MultiNodeMultiWriter   AccessMode = "MULTI_NODE_MULTI_WRITER"
)

// MultiNode reports whether the mode allows several nodes to use the volume at once.
func (m AccessMode) MultiNode() bool { return strings.HasPrefix(string(m), "MULTI_NODE_") }

// ReadOnly reports whether the mode allows no writes.
func (m AccessMode) ReadOnly() bool { return m == SingleNodeReaderOnly || m == MultiNodeReaderOnly }

// OnePath reports whether the volume can be published at only one path of a node (CSI specification,
// NodePublishVolume, the table for plugins with SINGLE_NODE_MULTI_WRITER).
func (m AccessMode) OnePath() bool { return !m.MultiNode() && m != SingleNodeMultiWriter }

// Capability is a CSI VolumeCapability.
type Capability struct {
	// Block is true for a raw device, and false for a mounted filesystem or directory.
	Block bool
	// FSType is the requested filesystem. If it is empty, any filesystem satisfies the request.
	FSType     string
	MountFlags []string
	Mode       AccessMode
}

// FSTypes are the filesystems that volumes can have; the first is the default.
var FSTypes = []string{"ext4", "xfs", "btrfs"}

// ValidFSType reports whether s is one of FSTypes.
func ValidFSType(s string) bool { return slices.Contains(FSTypes, s) }
