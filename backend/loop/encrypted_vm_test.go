//go:build vm

package loop_test

import (
	"testing"

	"github.com/trivet-csi/trivet/backend/backendtest/targets"
)

func TestEncrypted(t *testing.T) { targets.Run(t, "images-encrypted") }

func TestEncryptedNFS(t *testing.T) { targets.Run(t, "images-nfs-encrypted") }
