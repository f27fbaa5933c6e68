// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {ERC20} from "@openzeppelin/contracts/token/ERC20/ERC20.sol";

/// @title Token of the tests, with the six decimals of USDC. Never deployed elsewhere: anybody may mint.
contract TestToken is ERC20 {
    constructor() ERC20("Test dollar", "TUSD") {}

    function decimals() public pure override returns (uint8) {
        return 6;
    }

    function mint(address account, uint256 amount) external {
        _mint(account, amount);
    }
}
