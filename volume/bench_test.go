package volume_test

import (
	"testing"

	"github.com/trivet-csi/trivet/volume"
)

func BenchmarkParseID(b *testing.B) {
	for b.Loop() {
		if _, err := volume.ParseID("loop:default.0a1b2c3d:pvc-0d1e2f3a-4b5c-6d7e-8f90-a1b2c3d4e5f6"); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkParseRecord(b *testing.B) {
	text, err := record().MarshalRecord()
	if err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if _, err := forms.ParseVolume(text); err != nil {
			b.Fatal(err)
		}
	}
}
