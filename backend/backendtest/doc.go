// Package backendtest is the conformance suite. It tests behaviour that users rely on and csi-sanity does
// not test. It calls a whole driver through its socket, as an orchestrator does, on real devices and
// mounts.
//
// The suite is one table (table.go). A row has a name, the features that it needs, and a test. A [Target]
// describes a backend on a medium, and states the features of its kinds of volume. Run runs each row
// with every kind that has all features that the row needs.
//
// To test a new kind, describe it and run it:
//
//	func TestMain(m *testing.M) { backendtest.Main(m, example.Kind) }
//
//	func TestConformance(t *testing.T) {
//		backendtest.Run(t, backendtest.Target{
//			Name: "example", Backend: example.Kind, Pool: backendtest.DefaultPool,
//			Class:  map[string]string{"backend": example.Kind.Name},
//			Features: backendtest.NodeLocal | backendtest.Divisible | backendtest.Expand,
//			Kinds:  backendtest.Directories(), // or Devices("ext4", "xfs")
//			Medium: backendtest.OnFilesystem(backendtest.Formatted("xfs")),
//		})
//	}
//
// Run fails if the backend implements an optional interface whose feature no kind states, unless
// Target.Advertised contains the feature, and if a kind states a feature whose interface the backend does
// not implement. Target.Except gives the reason for each row that does not apply. If the target is an entry
// in package targets, csi-sanity (test/sanity) and verification (test/verify) test it, too.
package backendtest
