// Package move moves the volume of a PersistentVolumeClaim to another node, for `kubectl trivet move`. It uses only the
// Kubernetes API, with the rights of a user: snapshots of the claim are restored on the other node, and the PersistentVolume
// of the claim is then replaced by one of the same name. docs/design/move.md describes the steps and what always holds.
//
// It also keeps copies of a claim's volume on another node, for `kubectl trivet protect`, and gives a claim whose node is lost such
// a copy, for `kubectl trivet recover`, which uses the steps of a move after its last copy.
//
// The state of a move is a ConfigMap in the namespace of the drivers, which users of the claim cannot write. It is written
// before each step, and each step can be repeated, so that the command can be killed at any time.
package move
