// Package luks creates, checks and opens LUKS2 containers on block devices, with cryptsetup(8) and the device mapper. It
// knows neither volumes nor pools.
//
// A container that another program could have written is checked before cryptsetup reads it (Check), because its header
// determines how much memory and time the derivation of a key takes.
package luks
