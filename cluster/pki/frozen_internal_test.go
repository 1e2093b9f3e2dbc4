package pki

import (
	"testing"

	"github.com/trivet-csi/trivet/test/frozen"
)

// TestFrozenNames: the files of certificates, and the names in certificates, do not change.
func TestFrozenNames(t *testing.T) {
	frozen.List(t, "names", []string{certFile, keyFile, rootsFile, NodeURI("csi.trivet.dev", "node-1.example").String(), ControllerURI("csi.trivet.dev").String()})
}
