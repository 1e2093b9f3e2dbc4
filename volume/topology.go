package volume

import (
	"crypto/sha256"
	"encoding/hex"
	"regexp"
)

// maxLabelLength is the longest value of a Kubernetes label.
const maxLabelLength = 63

const labelHashDigits = 16

var (
	labelPattern = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$`)
	labelInvalid = regexp.MustCompile(`[^A-Za-z0-9._-]`)
)

// TopologyValue returns the value of a node in topology segments: the node's name if that can be a label's
// value, otherwise its beginning and a hash. PersistentVolumes contain it, so it must never change.
func TopologyValue(node string) string {
	if len(node) <= maxLabelLength && labelPattern.MatchString(node) {
		return node
	}
	sum := sha256.Sum256([]byte(node))
	head := "n" + labelInvalid.ReplaceAllString(node, "-")
	if labelPattern.MatchString(node[:min(1, len(node))]) {
		head = head[1:] // the name begins with a valid first character
	}
	head = head[:min(len(head), maxLabelLength-1-labelHashDigits)]
	return head + "-" + hex.EncodeToString(sum[:])[:labelHashDigits]
}
